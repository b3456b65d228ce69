"""Prompts for measuring: what speculation gains depends on what is written, so there is one of each common kind, each
with an answer of more than the 128 tokens that are usually measured."""

PROMPTS = {
    "code": "Write a Python class for a stack with push, pop, peek and size, with docstrings, and a short test of it.",
    "maths": "A tank holds 240 litres. One pipe fills it in 6 hours, a second one in 4 hours, and a drain empties the "
    "full tank in 8 hours. All three are open. How long does it take to fill the tank? Show every step.",
    "prose": "Write a short story about a clockmaker who finds a watch that runs backwards.",
    "chat": "I want to start running in the mornings, but I never manage to get up. What would you do in my place?",
}
