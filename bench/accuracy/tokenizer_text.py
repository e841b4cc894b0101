"""Text that the small model's tokenizer is trained on, made up from a seed.

Lines like those that the model will meet: prose, sums, records, tool calls, chat.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

COMMON_WORDS = """
the be to of and a in that have it for not on with he as you do at this but his by from they we say
her she or an will my one all would there their what so up out if about who get which go me when
make can like time no just him know take people into year your good some could them see other than
then now look only come its over think also back after use two how our work first well way even new
want because any these give day most us is are was were been has had did said made found here more
very much many such each every both few own same another while where why again still never always
often once between under through before during against without within around across along great
small large long short high low old young early late right left open close easy hard true false
question answer number sum result value name list order table word letter text line page book story
house home school city country world water food hand head eye face room door car street road river
tree dog cat bird fish horse red blue green yellow black white brown color light dark warm cold
morning evening night week month today tomorrow yesterday hour minute second child man woman friend
family mother father brother sister teacher student doctor player team game music song picture
write read speak listen learn teach help ask tell call try need feel become leave put mean keep let
begin seem show hear play run move live believe hold bring happen must should provide sit stand
lose pay meet include continue set change lead understand watch follow stop create allow add spend
grow walk win offer remember love consider appear buy wait serve die send expect build stay fall
cut reach kill remain suggest raise pass sell require report decide pull apple orange banana bread
milk cheese coffee tea sugar salt table chair window garden market price money cost dollar total
buys sells gives has left many altogether remaining twice half double plus minus times divided equal
router worker scheduler cache prefix token request response model engine server batch page memory
kernel attention expert latent prompt stream queue latency throughput policy tree node hash block
weather temperature location date city currency amount email phone address age title author status
"""
FIRST_NAMES = """
Alice Bob Carol David Emma Frank Grace Henry Isabel Jack Karen Liam Maria Noah Olivia Peter Quinn
Rachel Samuel Tina Ursula Victor Wendy Xavier Yara Zoe
"""
CITIES = """
Berlin Paris London Tokyo Rome Madrid Vienna Oslo Cairo Lima Boston Chicago Toronto Sydney Dublin
Prague Lisbon Athens Seoul Delhi
"""
COUNTABLES = "apples books coins cards stamps pens marbles stones shells cookies tickets boxes"
FUNCTIONS = "get_weather search_web send_email add_event convert_currency get_time calculate"

WORDS, NAMES, PLACES = COMMON_WORDS.split(), FIRST_NAMES.split(), CITIES.split()
THINGS, TOOLS = COUNTABLES.split(), FUNCTIONS.split()


def corpus(seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    makers = [prose, arithmetic, story_problem, record, tool_call, recall, chat]
    for index in range(12_000):
        yield makers[index % len(makers)](draw)


def prose(draw: random.Random) -> str:
    def clause() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(4, 9)))

    first = clause()
    return f"{first[0].upper()}{first[1:]}, {clause()}. {draw.choice(NAMES)} {clause()}.\n"


def arithmetic(draw: random.Random) -> str:
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    sign, value = draw.choice([("+", a + b), ("-", a - b), ("*", a * b)])
    return f"Question: What is {a} {sign} {b}?\nAnswer: {a} {sign} {b} = {value}\n\n"


def story_problem(draw: random.Random) -> str:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(2, 60), draw.randint(2, 60)
    return (
        f"Question: {name} has {a} {thing} and buys {b} more. How many {thing} does {name} have "
        f"now?\nAnswer: {name} has {a} + {b} = {a + b} {thing}. The answer is {a + b}.\n\n"
    )


def record(draw: random.Random) -> str:
    value = {
        "name": draw.choice(NAMES),
        "city": draw.choice(PLACES),
        "age": draw.randint(18, 90),
        "active": draw.random() < 0.5,
        draw.choice(WORDS): draw.choice([draw.choice(WORDS), None, draw.randint(0, 999)]),
        "items": draw.sample(THINGS, 2),
    }
    return json.dumps(value, indent=draw.choice([None, 2])) + "\n"


def tool_call(draw: random.Random) -> str:
    call = {"name": draw.choice(TOOLS), "arguments": {"location": draw.choice(PLACES)}}
    return f"What is the weather like in {draw.choice(PLACES)}? {json.dumps(call)}\n"


def recall(draw: random.Random) -> str:
    key, other = draw.sample(WORDS, 2)
    return (
        f"The value of {key} is {draw.randint(1000, 9999)}. Remember the key {other}: "
        f"{draw.randint(1000, 9999)}. Sort: {', '.join(sorted(draw.sample(WORDS, 4)))}.\n"
    )


def chat(draw: random.Random) -> str:
    topic = draw.choice(["router", "worker", "scheduler", "prefix cache", "model", "tree"])
    return (
        f"Hello! Can you tell me what the {topic} does? You are a helpful assistant. Please write "
        f"a short answer about {draw.choice(WORDS)}. I'm sorry, I don't know. Thank you, "
        f"{draw.choice(NAMES)}! It's done, isn't it? You're welcome.\n"
    )
