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
    if not isinstance(name_or_text, str):
        raise InvalidArgument(f"a chat template is a string, not a {type(name_or_text).__name__}")
    if name_or_text in BUILTIN:
        return BUILTIN[name_or_text]
    if "{%" in name_or_text or "{{" in name_or_text:
        return name_or_text
    try:
        path = Path(name_or_text).expanduser()
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{name_or_text}: the chat template is not UTF-8 text") from None
    except (OSError, ValueError, RuntimeError) as e:  # RuntimeError: no home folder
        why = getattr(e, "strerror", None) or e
        raise InvalidArgument(f"chat template {name_or_text!r:.200}: {why}") from None
    raise InvalidArgument(
        f"no chat template {name_or_text!r:.200}: give a built-in name ({', '.join(BUILTIN)}), a file, or Jinja text"
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


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses the two operators with which a few characters fill the memory or take a day."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context, operator, left, right):
        """What left operator right is, when that is of a reasonable size."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and numbers and isinstance(left, int) and right > 10_000:
            raise jinja2.TemplateError("the result of ** is too large")
        if operator == "*" and not numbers:
            count = right if isinstance(right, int) else left
            things = left if isinstance(right, int) else right
            if isinstance(count, int) and hasattr(things, "__len__") and count * len(things) > 10_000_000:
                raise jinja2.TemplateError("the result of * is too large")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=16)
def _compile(source):
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source)


def render(source, variables):
    """Renders a chat template. Whatever goes wrong in it is a TemplateError in words."""
    try:
        template = _compile(source)
    except jinja2.TemplateSyntaxError as e:
        raise TemplateError(f"the chat template does not parse (line {e.lineno}): {e.message}") from None
    except jinja2.TemplateError as e:
        raise TemplateError(f"the chat template does not parse: {e.message or type(e).__name__}") from None
    except (RecursionError, MemoryError):
        raise TemplateError("the chat template does not parse: it is nested too deeply or too large") from None
    except Exception as e:  # Python's own limits: 20 nested loops, the digits of a number, ...
        raise TemplateError(f"the chat template does not compile: {type(e).__name__}: {e}") from None
    try:
        return template.render(variables)
    except RecursionError:
        raise TemplateError("the chat template recurses without end") from None
    except MemoryError:
        raise TemplateError("there is no memory for what the chat template makes of this conversation") from None
    except jinja2.TemplateError as e:
        raise TemplateError(f"the chat template refuses this conversation: {e.message or type(e).__name__}") from None
    except Exception as e:  # a template is data: a TypeError in it is not a bug of ours
        raise TemplateError(f"the chat template fails on this conversation: {type(e).__name__}: {e}") from None
