"""Markdown as the pages show it: what it becomes, while it is still being written too. No server is needed."""

from __future__ import annotations

import pytest

from tests.browser.viewing import Viewer

pytestmark = pytest.mark.campaign
# The same text at once and letter by letter, as the page's own module shows it.
RENDERED = """async (source) => {
  const { Markdown } = await import("/ui/chat/markdown.js");
  const whole = document.createElement("div"), pieces = document.createElement("div"), view = new Markdown(pieces);
  new Markdown(whole).show(source);
  for (let end = 1; end <= source.length; end++) view.show(source.slice(0, end));
  return [whole.innerHTML, pieces.innerHTML];
}"""
# How many elements of earlier blocks a longer text makes anew.
REPLACED = """async (source) => {
  const { Markdown } = await import("/ui/chat/markdown.js");
  const place = document.createElement("div"), view = new Markdown(place);
  view.show(source);
  const before = [...place.querySelectorAll("*")];
  view.show(source + " more");
  return before.filter((each) => !place.contains(each)).length;
}"""
MARKDOWN = {
    "# One\n\ntwo\nlines **bold *both*** ~~no~~": (
        "<h3>One</h3><p>two<br>lines <strong>bold <em>both</em></strong> <s>no</s></p>"
    ),
    "a\n\n- one\n  - two\n    1. three\n- four\n\ntext": (
        "<p>a</p><ul><li>one<ul><li>two<ol><li>three</li></ol></li></ul></li><li>four</li></ul><p>text</p>"
    ),
    "3. x\n\n   y\n4. z": '<ol start="3"><li><p>x</p><p>y</p></li><li>z</li></ol>',
    "> q\n> - i\n\n---\n`a*b*` snake_case_name 2*3*4 \\*no\\*": (
        "<blockquote><p>q</p><ul><li>i</li></ul></blockquote><hr>"
        "<p><code>a*b*</code> snake_case_name 2<em>3</em>4 *no*</p>"
    ),
    "| a | b |\n|:-:|--:|\n| `x|y` | 2 |": (
        '<div class="table"><table><thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td class="center"><code>x|y</code></td><td class="right">2</td></tr></tbody></table></div>'
    ),
    "see https://example.org/a_b. Or [it](http://x.org/(y))": (
        '<p>see <a href="https://example.org/a_b" title="https://example.org/a_b" rel="noopener noreferrer" '
        'target="_blank">https://example.org/a_b</a>. Or <a href="http://x.org/(y)" title="http://x.org/(y)" '
        'rel="noopener noreferrer" target="_blank">it</a></p>'
    ),
    "```py\nx = 1\n\n\tif x:\n```\nafter": (
        '<div class="code"><div class="code-head"><span>py</span><button type="button">Copy</button></div>'
        '<pre tabindex="0"><code>x = 1\n\n\tif x:</code></pre></div><p>after</p>'
    ),
}


def test_markdown_is_the_same_at_once_and_letter_by_letter(viewer: Viewer) -> None:
    with viewer.modules() as page:
        for source, expected in MARKDOWN.items():
            whole, pieces = page.evaluate(RENDERED, source)
            assert whole == expected
            assert pieces == expected, source
        whole, pieces = page.evaluate(RENDERED, "\n\n".join(MARKDOWN))
        assert whole == pieces
        for awkward in ("> " * 3000, "- " * 3000, "*a _b " * 3000, "[" * 5000, "`" * 4999 + " `", "#" * 5000):
            assert page.evaluate(RENDERED.replace("end++", "end += 997"), awkward)[0]


def test_longer_text_leaves_the_blocks_before_it_alone(viewer: Viewer) -> None:
    with viewer.modules() as page:
        items = "".join(f"- item {number} with `code`\n" for number in range(200))
        assert page.evaluate(REPLACED, "# Title\n\ntext\n\nthe last") == 1
        assert page.evaluate(REPLACED, items + "- the last") == 1
        assert page.evaluate(REPLACED, "text\n\n```py\n" + "x = 1\n" * 500 + "y") == 0
