from __future__ import annotations

import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from plait.errors import RequestError, TokenizerError
from plait.text import template_limits
from plait.text.chat_template import ChatTemplate, validate_messages
from tests.text import small_tokenizers as small

MESSAGES = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": "Xin chào\n\nbạn <b>"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": " bye "},
]
GROW = "{% set ns = namespace(s=START) %}{% for i in range(64) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


REACHES_OUT = {
    "object internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "joiner": "{{ joiner.__init__.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "helper": "{{ strftime_now.__globals__['json'].codecs.open('MARKER', 'w') }}",
    "attr filter": "{{ (raise_exception|attr('__globals__'))['__builtins__']['open']('MARKER', 'w') }}",
    "format": "{{ '{0.__globals__[json]}'.format(raise_exception) }}",
    "namespace": "{{ namespace.__init__.__globals__['os'].system('touch MARKER') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "change messages": "{{ messages.append(1) }}",
}
TAKES_LONG = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in [1,2] recursive %}{% if loop.depth < 60 %}{{ loop([1,2]) }}{% endif %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "signs": "{{ " + "-" * 20000 + "1 }}",
    "long": "x" * 600_000,
}
GETS_LARGE = {
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat list": "{{ ([[1]] * 10**7) * 10**7 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "center filter": "{{ 'a' | center(10**10) }}",
    "center method": "{{ 'a'.center(10**10) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent filter": "{{ '%10000000000s' | format('a') }}",
    "format width": "{{ '{:>10000000000}'.format(1) }}",
    "format argument": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format keyword": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "batch": "{{ 'ab' | batch(10**10, 'x') | list }}",
    "wordwrap": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='x' * 1000) | length }}",
    "wordwrap of one word": "{{ ('a' * 500000) | wordwrap(1) | length }}",
    "many": "{{ range(99999) | map('center', 8000000) | list | length }}",
    "sum": "{{ ([range(99999) | list] * 60) | sum(start=[]) | length }}",
    "concat": grow("'ab'", "ns.s ~ ns.s"),
    "add": grow("'ab'", "ns.s + ns.s"),
    "multiply": grow("9", "ns.s * ns.s"),
    "join filter": grow("'ab'", "[ns.s, ns.s] | join('x')"),
    "join method": grow("'ab'", "''.join([ns.s, ns.s])"),
    "replace": grow("'ab'", "ns.s.replace('', ns.s)"),
    "replace filter": grow("'ab'", "ns.s | replace('', ns.s)"),
    "format": grow("'ab'", "'{0}{0}'.format(ns.s)"),
    "percent": grow("'ab'", "'%s%s' % (ns.s, ns.s)"),
    "list": grow("1", "[ns.s, ns.s]"),
    "dict": grow("1", "dict(a=ns.s, b=ns.s)"),
    "tuple": grow("1", "(ns.s, ns.s)"),
    "set block": "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "list of characters": "{{ ('a' * 1000000) | list | length }}",
    "map of characters": "{{ ('a' * 1000000) | map('upper') | list | length }}",
    "lines": "{{ ('\\n' * 1000000).splitlines() | length }}",
    "words": "{{ ('a ' * 500000).split() | length }}",
    "fields": "{{ ('a,' * 500000).split(',') | length }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) | length }}",
    "find from the end": "{{ ('a' * 120000).rfind('ab' + 'a' * 60000) }}",
    "index from the end": "{{ ('a' * 120000).rindex('ab' + 'a' * 60000) }}",
    "split from the end": "{{ ('a' * 120000).rsplit('ab' + 'a' * 60000) | length }}",
    "find": "{{ ('a' * 120000).find('a' * 60000 + 'b') }}",
    "strip": "{{ ('a' * 120000).strip('b' * 60000 + 'a') | length }}",
    "trim": "{{ ('a' * 120000) | trim('b' * 60000 + 'a') | length }}",
    "output": "{% for i in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}",
}

LARGE_NUMBERS = {
    "hexadecimal": "{{ ('f' * 1000) | int(0, 16) }}",
    "decimal": "{{ ('1.' ~ '1' * 1000) | float }}",
    "add": "{% set ns = namespace(s=2 ** 4000) %}{% for i in range(200) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "subtract": "{% set ns = namespace(s=2 ** 4000, t=0) %}"
    "{% for i in range(400) %}{% set t = ns.s %}{% set ns.s = ns.t - ns.s %}{% set ns.t = t %}{% endfor %}",
    "divide": "{{ big // 3 }}",
    "remainder": "{{ big % 3 }}",
    "quotient": "{{ 3 / big }}",
    "round": "{{ 5 | round(-8000000) }}",
    "ceil": "{{ 5 | round(8000000, 'ceil') }}",
}
BYTES = {
    "ljust": "{{ 'a'.encode().ljust(150000000) | length }}",
    "repeat": "{{ (('a' * 1000).encode() * 150000) | length }}",
    "integer": "{{ (1).to_bytes(150000000, 'big') | length }}",
    "integer back": "{{ (1).from_bytes('abc', 'big') }}",
    "replace": "{{ ('a' * 10000).encode().replace('a'.encode(), ('b' * 10000).encode()) | length }}",
    "join": "{{ ('a' * 10000).encode().join(['a'.encode()] * 10000) | length }}",
    "percent": "{{ (('%' + '150000000d').encode() % 5) | length }}",
    "attr": "{{ ('a' | attr('encode'))() }}",
    "item": "{{ 'a'['encode']() }}",
    "given method": "{{ given.ljust(150000000) | length }}",
    "given": "{{ (given * 150000000) | length }}",
}


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {}).render(validate_messages(MESSAGES), **variables)


@pytest.mark.parametrize("source", REACHES_OUT.values(), ids=REACHES_OUT)
def test_a_template_reaches_nothing_outside(source: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    try:
        text = render(source.replace("MARKER", str(marker)))
    except TokenizerError as error:
        text = str(error)
    assert not marker.exists()
    assert "root:" not in text and "<module" not in text and "<class" not in text


@pytest.mark.parametrize("source", TAKES_LONG.values(), ids=TAKES_LONG)
def test_a_template_that_takes_long_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)
    with pytest.raises(TokenizerError) as error:
        render(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", GETS_LARGE.values(), ids=GETS_LARGE)
def test_a_template_that_builds_too_much_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_VALUE_SIZE", 1 << 20)
    monkeypatch.setattr(template_limits, "MAX_TOTAL_SIZE", 1 << 24)
    with pytest.raises(TokenizerError, match="too large"):
        render(source)


@pytest.mark.parametrize("source", LARGE_NUMBERS.values(), ids=LARGE_NUMBERS)
def test_a_template_computes_no_large_number(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"too large an integer|reads a number of more|rounds to more"):
        render(source, big=2**5000)


@pytest.mark.parametrize("source", BYTES.values(), ids=BYTES)
def test_a_template_has_no_bytes(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"unsafe|bytes|undefined"):
        render(source, given=b"a")


def test_long_texts_may_be_searched_and_split() -> None:
    text = "<|im_start|>a line of words</think>\n" * 40_000
    source = "{{ text.split('</think>') | length }} {{ text.splitlines() | length }} {{ text.rfind('<|im_start|>') }}"
    assert render(source, text=text) == f"{40_001} {40_000} {text.rfind('<|im_start|>')}"
    assert render(
        "{{ 7 // 2 }} {{ 7 % 4 }} {{ 7 - 9 }} {{ 7 / 2 }} {{ 'ff' | int(0, 16) }} {{ 2.567 | round(2) }}"
    ) == ("3 3 -2 3.5 255 2.57")


def test_a_long_text_may_be_wrapped() -> None:
    text = "some words " * 20_000
    assert render("{{ text | wordwrap(79) }}", text=text).replace("\n", " ") == text.rstrip()


@pytest.mark.parametrize("pattern", ["'%1000d' * 60000", "'%1000d'", "'%-_999999999Y'", "'%d' * 200", "5"])
def test_the_time_cannot_be_written_at_length(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="strftime_now takes"):
        render("{{ strftime_now(" + pattern + ") }}")


def test_the_time_can_be_written() -> None:
    assert render("{{ strftime_now('%-d.%m.%Y %0d %%') }}")[-2:] == " %"


def test_the_limits_hold_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            render(TAKES_LONG["macro"])
        except TokenizerError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1


@pytest.mark.parametrize(
    "source",
    [
        small.CHATML,
        small.WITH_BOS,
        "{% for m in messages %}\n  {% if loop.first %}\n  {{ m.role }}\n  {% endif %}\n{{ m | tojson }}\n{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{%- for m in messages -%}{% if m.role == 'user' %}{% continue %}{% endif %}{{ loop.index }}/{{ loop.length }}"
        "{% if loop.last %}!{% else %}{{ loop.nextitem.role }}{% endif %}{%- endfor -%}",
        "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.text = ns.text ~ m.role ~ ns.n %}{% endfor %}{{ ns.text }}",
        "{% macro show(m, deep=1) %}<{{ m.role | upper }}:{{ caller() if caller else m.content | trim }}>{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}{% call show(messages[0]) %}inner{% endcall %}",
        "{% set a, b = 'x', ['y', {'k': ('v', 1)}] %}{{ a }}{{ b }}{{ dict(q=1) }}{{ [1, 2] + [3] }}{{ 'é' | tojson }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
        "{{ '%s-%03d' % ('a', 7) }}",
        "{% if tools is none and documents is none %}"
        "{{ messages[-1].content.split(' ') | list }}{{ tools }}{% endif %}",
        "{{ messages[1]['content'].replace('\n', ' ').strip().title() }}{{ 'ab' * 3 }}"
        "{{ {'a': [1, 2]} | tojson(indent=2) }}",
        "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}={{ v }};{% endfor %}{{ strftime_now('%d') | length }}",
        "{{ bos_token }}{{ undefined_name }}{{ undefined_name is defined }}{{ enable_thinking | default('unset') }}",
    ],
)
def test_templates_render_as_in_transformers(source: str, chatml_directory: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(chatml_directory)
    expected = oracle.apply_chat_template(MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert ChatTemplate(source, special).render(validate_messages(MESSAGES)) == expected


def test_a_template_can_refuse_a_conversation() -> None:
    with pytest.raises(TokenizerError, match="roles must alternate"):
        render("{{ raise_exception('roles must\n alternate') }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ 'a' | nonsense }}"])
def test_a_faulty_template_is_an_error_of_ours(source: str) -> None:
    with pytest.raises(TokenizerError, match="does not compile"):
        ChatTemplate(source, {})


def test_a_template_that_loops_over_parts_gets_parts() -> None:
    source = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert render(source) == "[Be  brief.\n]"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert validate_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_an_assistant_message_may_have_tool_calls_alone() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert validate_messages([message])[0]["content"] == ""


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        {"role": "user"},
        ["hi"],
        [{"content": "hi"}],
        [{"role": "", "content": "hi"}],
        [{"role": 3, "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_unusable_messages_are_refused(messages: object) -> None:
    with pytest.raises(RequestError) as error:
        validate_messages(messages)
    assert error.value.field == "messages"
