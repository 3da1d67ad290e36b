"""Notebooks show a runtime, a pool, a group, a graph and a resident."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Concat, Role, Runtime, Scatter, method
from colocate.errors import RoleError


class Writer(Role):
    @method(dispatch=Scatter("words"), collect=Concat())
    def write(self, words: list[str]) -> list[str]:
        return [word.upper() for word in words]

    @method
    def hold(self, over: threading.Event) -> None:
        over.wait(30)

    @method
    def fail(self, text: str) -> None:
        raise ValueError(text)


class Critic(Role):
    @method
    def score(self) -> float:
        return 0.0


class Page(HTMLParser):
    """The text of html, in which each element must be closed, and the looks of the states."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.looks: list[str | None] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        self._open.append(tag)
        for name, value in attributes:
            assert name in ("class", "open"), f"nothing is loaded from anywhere: {name}={value}"
            if tag == "i":
                self.looks.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page(thing: Any) -> Page:
    html = thing._repr_html_()
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    return Page(html)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with colocate.connect() as runtime:
        yield runtime


@pytest.fixture
def group(runtime: Runtime) -> ColocatedGroup:
    roles = {"writer": colocate.role(Writer), "critic": colocate.role(Critic).on(slots=[0])}
    return runtime.reserve(slots=2, name="main").spawn(roles, name="demo")


def test_group_page_shows_roles_and_residents(group: ColocatedGroup) -> None:
    kept = group["writer"].write.keep(["a", "b", "c"])
    kept.fetch()
    shown = page(group)
    assert re.match(r"group demo ready \d+ s, test_html\.py:", shown.text)
    assert "role class ranks mesh methods writer Writer 2 dp=2 write, hold, fail critic Critic 1 dp=1 score" in (
        shown.text
    )
    assert "worker 0 running" in shown.text
    assert "role critic rank 0/1 Critic" in shown.text
    assert "resident writer.write kept test_html.py:" in shown.text
    assert set(shown.looks) == {"good"}
    for thing in (group.owner.owner, group.owner.owner.graph, group.owner):
        assert re.search("pool main ready .* group demo ready", page(thing).text)


def test_a_resident(group: ColocatedGroup) -> None:
    """A resident shows each rank's rows and bytes, and at last what freed it; a role's error is escaped."""
    kept = group["writer"].write.keep(["a", "b", "c"])
    kept.fetch()
    assert re.fullmatch(
        r"resident of writer\.write kept group demo, \S+:\d+ rank rows bytes 0 2 0 B 1 1 0 B",
        page(kept).text,
    )
    kept.free()
    assert page(kept).text.endswith("freed by free()")
    failed = group["writer"].fail.keep("<script>alert('x')</script>")
    with pytest.raises(RoleError):
        failed.fetch()
    assert "<script>" not in failed._repr_html_()
    assert "ValueError: <script>alert('x')</script>" in page(failed).text


def test_page_renders_without_answers_or_locks(runtime: Runtime, group: ColocatedGroup) -> None:
    """A page needs no answer and no lock: it is rendered while lanes are busy and the group's locks are held."""
    over = threading.Event()
    call = group["writer"].hold.submit(over)
    kept = group["writer"].write.keep(["a", "b"])
    with group._node.order.lock, group.owner._node.lock:
        shown: list[Page] = []
        thread = threading.Thread(target=lambda: shown.extend(page(each) for each in (runtime, group, kept)))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert "call writer.hold waits for rank 0, 1" in shown[1].text
    assert shown[2].text.startswith("resident of writer.write pending")
    assert shown[2].looks == ["busy"]
    over.set()
    call.result()


def test_closed_page_names_closer(runtime: Runtime, group: ColocatedGroup) -> None:
    kept = group["writer"].write.keep(["a", "b"])
    kept.fetch()
    pool = group.owner
    group.close()
    assert re.search(
        r"closed \d s, test_html.py:\d+ closed by group\.close\(\) at \S+test_html.py:\d+", page(group).text
    )
    assert re.search(r"lost .* its group was closed by group\.close\(\) at \S+test_html.py:\d+", page(kept).text)
    runtime.close()
    assert "closed by closing runtime 'local' (runtime.close() at " in page(pool).text
    assert "closed by runtime.close() at " in page(runtime).text
    assert page(runtime).looks == ["over"]
