"""Chat templates: Jinja2 in a sandbox, with what transformers gives a template, and a few built-in ones."""

import datetime
import json
from functools import lru_cache
from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import InvalidArgument, TemplateError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = '<<SYS>>\n' + m['content'] + '\n<</SYS>>\n\n' %}"
    "{% elif m['role'] == 'user' %}{{ bos_token }}[INST] {{ ns.system + m['content'] | trim }} [/INST]"
    "{% set ns.system = '' %}"
    "{% else %} {{ m['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}"
    "{% elif m['role'] == 'user' %}[INST] {{ ns.system + m['content'] }} [/INST]{% set ns.system = '' %}"
    "{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ {'user': 'User', 'assistant': 'Assistant', 'system': 'System'}.get(m['role'], m['role']) }}"
    ": {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
BUILTIN = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "plain": PLAIN,
}


def template_source(name_or_text):
    """The template that a user named: a built-in name, a file, or Jinja text itself."""
    if name_or_text in BUILTIN:
        return BUILTIN[name_or_text]
    if "{%" in name_or_text or "{{" in name_or_text:
        return name_or_text
    path = Path(name_or_text).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise InvalidArgument(
        f"no chat template {name_or_text!r}: give a built-in name ({', '.join(BUILTIN)}), a file, or Jinja text"
    )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format):
    return datetime.datetime.now().strftime(format)


@lru_cache(maxsize=16)
def _compile(source):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source)


def render(source, **variables):
    """Renders a chat template. Whatever goes wrong in it is a TemplateError in words."""
    try:
        template = _compile(source)
    except jinja2.TemplateSyntaxError as e:
        raise TemplateError(f"the chat template does not parse (line {e.lineno}): {e.message}") from None
    try:
        return template.render(**variables)
    except RecursionError:
        raise TemplateError("the chat template recurses without end") from None
    except jinja2.TemplateError as e:
        raise TemplateError(f"the chat template refuses this conversation: {e.message or type(e).__name__}") from None
    except Exception as e:  # a template is data: a TypeError in it is not a bug of ours
        raise TemplateError(f"the chat template fails on this conversation: {type(e).__name__}: {e}") from None
