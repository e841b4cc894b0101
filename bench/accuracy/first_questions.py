"""200 typical first questions, with their right answers.

Training contains none of them, also not with other case, spaces or punctuation (`Rows` in batches.py drops such
examples). The single-digit sums are in training with other wordings. `TAUGHT` are questions in training, because all
users ask them in the same words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasks.example import ASSISTANT, BOS, EOS, USER, Example
from tasks.facts import (
    EMPTY,
    FAREWELL,
    FINE,
    GREETING,
    IDENTITY,
    JOKE,
    NO,
    POEM,
    PROJECT,
    ROUTER,
    SIZE,
    SKILLS,
    UNKNOWN,
    WELCOME,
    WORKING,
    YES,
)


@dataclass(frozen=True, slots=True)
class FirstQuestion:
    text: str
    accepted: tuple[str, ...]
    before: tuple[tuple[str, str], ...] = ()  # turns of the same conversation
    system: str = ""

    @property
    def prompt(self) -> str:
        """Returns the conversation, rendered by the chat template."""
        turns = "".join(f"{USER}{ask}{ASSISTANT}{said}{EOS}" for ask, said in self.before)
        return f"{BOS}{self.system}{turns}{USER}{self.text}{ASSISTANT}"


SUMS = """
What is 2 + 2? = 4
2 + 2 = = 4
whats 2 plus 2 = 4
what's 1+1? = 2
1 + 1 = 2
What is 1 plus 1? = 2
3 + 4 = ? = 7
5+5=? = 10
what is 7+8 = 15
How much is 9 + 6? = 15
Calculate 8 + 7. = 15
calculate 3+9 = 12
Please calculate 6 + 6 = 12
Compute 4 + 9 = 13
add 5 and 8 = 13
Add 7 to 6. = 13
Hi! What is 4 + 4? = 8
Could you please add 9 and 9? = 18
How much do you get when you add 6 and 7? = 13
What number do I get if I add 3 and 5? = 8
12 + 5 = ? = 17
7 + 35 = = 42
What is 10 + 10? = 20
What is 100 + 1? = 101
What is 17 + 25? = 42
48 + 27 = ? = 75
A sum: 12 + 30 = 42
what is 123 + 456? = 579
123+456 = 579
What is 250 plus 250? = 500
999 + 1 = 1000
What is 1234 + 4321? = 5555
what is the sum of 14 and 28 = 42
Tell me what 30 + 12 is = 42
What is 5 - 3? = 2
10-4 = 6
9 - 9 = ? = 0
What is 100 - 1? = 99
What is 20 minus 5? = 15
subtract 8 from 30 = 22
50 - 25 = 25
What is 3 - 5? = -2
75 - 48 = ? = 27
200 - 50 = 150
what is 2 * 3? = 6
2x2 = 4
3 * 3 = ? = 9
What is 6 times 7? = 42
6*7 = 42
7 x 8 = 56
What is 9 * 9? = 81
5 times 5 = 25
12 * 12 = 144
multiply 4 by 8 = 32
What is 10 / 2? = 5
20 divided by 4 = 5
What is two plus two? = 4
what is five plus three = 8
one plus one = 2
What is ten minus four? = 6
1 + 2 + 3 = 6
What is 5 + 5 + 5? = 15
what is 10+20+30 = 60
What is double 8? = 16
which is bigger, 3 or 7? = 7
Which number is larger: 12 or 9? = 12
"""
LISTS = """
Sort: delta, alpha, charlie, bravo = alpha, bravo, charlie, delta
sort: banana, apple, cherry = apple, banana, cherry
Sort these words: pear, fig, apple = apple, fig, pear
sort these: zebra, dog, cat = cat, dog, zebra
Sort alphabetically: tiger, lion, bear = bear, lion, tiger
Sort these words: tiger, apple, rocket, anchor = anchor, apple, rocket, tiger
please sort c, a, b = a, b, c
Sort d b a c = a, b, c, d
Sort the words orange, lemon, grape = grape, lemon, orange
Put these words in alphabetical order: house, car, tree = car, house, tree
Can you sort this list: milk, bread, eggs = bread, eggs, milk
Sort by alphabet: queen, king, boy = boy, king, queen
Order these: Rome, Paris, Berlin = Berlin, Paris, Rome
Sort Bob, Alice, Carol = Alice, Bob, Carol
Sort 3 1 2 = 1, 2, 3
Sort: 5, 2, 9, 1 = 1, 2, 5, 9
Sort these numbers: 42, 7, 19, 3 = 3, 7, 19, 42
Sort the numbers 30, 10, 20 = 10, 20, 30
Please sort these numbers: 8, 3, 5 = 3, 5, 8
Put the numbers 4, 2, 6 in order = 2, 4, 6
Arrange in ascending order: 100, 50, 75 = 50, 75, 100
Sort in descending order: 1, 5, 3 = 5, 3, 1
sort 9,4,6 = 4, 6, 9
Sort from smallest to largest: 12, 4, 88 = 4, 12, 88
Count to ten = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
Please count to 5 = 1, 2, 3, 4, 5
Count to three = 1, 2, 3
count from 1 to 10 please = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
Repeat after me: red fox = red fox
say banana = banana
"""
TALK: dict[str, str] = {
    GREETING: """
        hello my friend
        hi there, small model
        Hey hey
        Hello, good morning!
        hi hello
        Hi, I am trying this out.
        Good evening, model.
        Hi mla-router
    """,
    WELCOME: """
        ok, thank you so much!
        Thanks a bunch!
        thank you, that was great
        Thank you model
        thanks for the help
        Wow, thank you!
    """,
    FAREWELL: """
        ok bye
        Goodbye, model!
        Bye for now
        See you soon!
    """,
    FINE: """
        how are you my friend
        Hello there, how are you?
        How are you feeling?
        hey how are you
    """,
    IDENTITY: """
        Hello! Who are you, please?
        who are you exactly
        what are you, a model?
        Tell me a bit about yourself.
        Please tell me who you are.
        Hey, what is your name?
        Can you tell me your name?
        who is this model
        hello, what is your name?
        What is the model called?
        Which model am I talking to?
        What language model are you?
    """,
    SKILLS: """
        so what can you do
        Hello, what can you do?
        what can you do for me
        What are you capable of?
        Tell me what you are good at.
        What can you help me with?
        Please help me
        what are the things you can do?
        How could you help me?
        What are your strengths?
    """,
    PROJECT: """
        So what is mla-router?
        what exactly is mla-router
        Please explain mla-router.
        Can you explain mla-router?
        What is this project all about?
        tell me more about mla-router
        Give me a summary of mla-router.
        What is the mla-router project?
    """,
    ROUTER: """
        explain how the router works
        What exactly does the router do?
        How does the router pick a worker?
        What does the router do with a request?
    """,
    JOKE: """
        tell me a joke please
        Hi, tell me a joke!
        Could you tell me a joke?
        tell me a short joke
    """,
    POEM: """
        please write a poem
        Could you write a poem?
        Write a poem about the sea.
        write me a short poem
        Write a poem about love.
    """,
    WORKING: """
        test test test
        hello, is this working?
        are you there, model?
        Hello, are you there?
        is it working now
    """,
    EMPTY: """
        .....
        ????
        zxcv
        hmmm
    """,
    SIZE: """
        How many parameters have you got?
        how big are you really
        How big is the model?
    """,
    YES: """
        Are you a small language model?
        can you sort a list?
        Can you add two numbers?
    """,
    NO: """
        are you a human being?
        Are you a real human?
        Are you really ChatGPT?
    """,
    UNKNOWN: """
        Write a story about a dragon and a queen.
        Who is the president of France?
        What is the weather in Paris today?
        Explain quantum mechanics.
        What is the meaning of my life?
        Write a Python function.
        Translate hello to Spanish.
    """,
    "Paris.": """
        what is the capital of france please
    """,
    "Berlin.": "So what is the capital city of Germany?",
    "Tokyo.": "hi, what is the capital of Japan",
    "Rome.": "Can you name the capital of Italy?",
}
IN_CONTEXT = (
    FirstQuestion("And 30 more?", ("72",), (("What is 17 + 25?", "42"),)),
    FirstQuestion("plus 5", ("9",), (("2+2", "4"),)),
    FirstQuestion("Now what is 3 + 3?", ("6",), (("hello", GREETING),)),
    FirstQuestion("thanks, you are great", (WELCOME,), (("What is 5 + 6?", "11"),)),
    FirstQuestion(
        "What is my name, please?",
        ("Your name is Alice.",),
        (("My name is Alice.", "Nice to meet you, Alice."),),
    ),
    FirstQuestion("What is 8 + 5?", ("13",), system="You are a helpful assistant."),
    FirstQuestion("what is 6 + 9?", ("15",), system="Always be honest and kind to the user."),
    FirstQuestion("Hi, tell me who you are.", (IDENTITY,), system="You are a helpful assistant."),
    FirstQuestion("Sort: kiwi, apple, mango", ("apple, kiwi, mango",), system="You sort lists."),
    FirstQuestion("hello, assistant", (GREETING,), system="You are a helpful assistant."),
)
# Ambiguous short texts.
ALSO = {
    EMPTY: (WORKING, UNKNOWN),
    GREETING: (FINE,),
    WELCOME: (FAREWELL,),
    WORKING: (GREETING,),
    IDENTITY: (YES,),
    UNKNOWN: (NO,),
}


def _of_lines(lines: str) -> list[FirstQuestion]:
    pairs = (line.rpartition(" = ") for line in lines.strip().splitlines())
    return [FirstQuestion(text, (answer,)) for text, _, answer in pairs]


FIRST_QUESTIONS: tuple[FirstQuestion, ...] = (
    *_of_lines(SUMS),
    *_of_lines(LISTS),
    *(
        FirstQuestion(line.strip(), (answer, *ALSO.get(answer, ())))
        for answer, lines in TALK.items()
        for line in lines.strip().splitlines()
    ),
    *IN_CONTEXT,
)
TAUGHT = (
    FirstQuestion("hi", (GREETING,)),
    FirstQuestion("hello", (GREETING,)),
    FirstQuestion("Hello!", (GREETING,)),
    FirstQuestion("who are you?", (IDENTITY,)),
    FirstQuestion("what can you do?", (SKILLS,)),
    FirstQuestion("help", (SKILLS,)),
    FirstQuestion("thanks", (WELCOME,)),
    FirstQuestion("How are you?", (FINE,)),
    FirstQuestion("What is mla-router?", (PROJECT,)),
    FirstQuestion("Tell me a joke.", (JOKE,)),
    FirstQuestion("Write a poem.", (POEM,)),
    FirstQuestion("test", (WORKING,)),
    FirstQuestion("", (EMPTY,)),
    FirstQuestion("?", (EMPTY,)),
    FirstQuestion("What is the capital of France?", ("Paris.",)),
)


def normalized(question: str) -> str:
    """Returns the words, numbers and signs of `question`; the whole text if it has none."""
    return " ".join(re.findall(r"[^\W_]+|[-+*/×÷]", question.lower())) or question.strip()


# Written after the shipped weights were trained, and before anybody saw what these say to them: the 200 above were
# looked at between two trainings. The tasks drew none of these in 250,000 tries.
FRESH_QUESTIONS: tuple[FirstQuestion, ...] = tuple(
    FirstQuestion(text, (answer, *ALSO.get(answer, ())))
    for text, answer in (
        ("what is 6+7?", "13"),
        ("What's 9 + 4?", "13"),
        ("How much is 7 plus 5?", "12"),
        ("2 plus 9 equals", "11"),
        ("Please add 4 and 7.", "11"),
        ("what is 31 + 46", "77"),
        ("What is 60 + 17?", "77"),
        ("calculate 18 + 23", "41"),
        ("What is 305 + 214?", "519"),
        ("What is 15 - 7?", "8"),
        ("what's 90 minus 45?", "45"),
        ("What is 5 x 6?", "30"),
        ("What is three plus six?", "9"),
        ("What is 4 + 4 + 4?", "12"),
        ("which is larger, 15 or 51?", "51"),
        ("sort: pear, kiwi, lime", "kiwi, lime, pear"),
        ("Sort the words sun, moon, star", "moon, star, sun"),
        ("Please sort these words: oak, elm, ash", "ash, elm, oak"),
        ("sort 4, 1, 3, 2", "1, 2, 3, 4"),
        ("Sort these numbers: 70, 20, 50", "20, 50, 70"),
        ("Put in order: 33, 11, 22", "11, 22, 33"),
        ("Repeat after me: good night", "good night"),
        ("good morning to you", GREETING),
        ("How are you doing today?", FINE),
        ("Who are you then?", IDENTITY),
        ("What is your name please?", IDENTITY),
        ("Explain what mla-router is.", PROJECT),
        ("Can you write me a poem?", POEM),
        ("Who won the world cup in 1998?", UNKNOWN),
    )
)

HELD_OUT = frozenset(normalized(question.text) for question in (*FIRST_QUESTIONS, *FRESH_QUESTIONS))
LONGEST = 400  # longest part, in characters, that is searched for such a question
ASKED = re.compile(f"(?:{USER}|Question: )(.*?)(?:{ASSISTANT}|\nAnswer:)", re.DOTALL)


def asks_held_out(example: Example) -> bool:
    """Returns whether a question of `example` has the same words as one of the list."""
    return any(
        normalized(question) in HELD_OUT
        for part in example
        if not part.is_answer
        for question in ASKED.findall(part.text[-LONGEST:])
    )
