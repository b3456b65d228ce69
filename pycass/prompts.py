"""Prompts for measuring: what speculation gains depends on what is written, so there is one of each common kind, each
with an answer of more than the 128 tokens that are usually measured."""

PROMPTS = {
    "code": "Write a Python class for a stack with push, pop, peek and size, with docstrings, and a short test of it.",
    "maths": "A tank holds 240 litres. One pipe fills it in 6 hours, a second one in 4 hours, and a drain empties the "
    "full tank in 8 hours. All three are open. How long does it take to fill the tank? Show every step.",
    "prose": "Write a short story about a clockmaker who finds a watch that runs backwards.",
    "chat": "I want to start running in the mornings, but I never manage to get up. What would you do in my place?",
}

# For choosing settings and studying drafts, so that what is chosen on these is measured on the others.
DEVELOPMENT = {
    "sorting": "Implement merge sort in Java and explain its running time.",
    "percent": "A coat costs 180 euros after a discount of 25 percent. What did it cost before, and what would 40 percent "
    "off have saved?",
    "letter": "Write a polite email to a landlord about a dripping tap and mouldy tiles in the bathroom.",
    "physics": "How does a refrigerator move heat from a cold place to a warm one?",
    "sql": "Given the tables books(id, title, author_id) and authors(id, name), write an SQL query that lists the authors "
    "with more than three books.",
    "geometry": "A ladder of 13 metres leans on a wall, its foot 5 metres away from it. How high does it reach, and how "
    "much lower if the foot slips by 2 metres?",
    "dialogue": "Write a dialogue between a tourist who has lost her passport and an officer at the railway station.",
    "german": "Erkläre einem Kind, warum es Ebbe und Flut gibt.",
}
