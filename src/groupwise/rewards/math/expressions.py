"""A small reader of mathematical answers: tokens become a tree; nothing is evaluated.

Precedence, from loose to tight: list, relation, set operation, sum, product (implicit too), sign,
power, postfix. What the grammar does not know raises `ReadError`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from groupwise.rewards.math.ast import (
    BRACKETS,
    CLOSERS,
    OVER,
    RELATIONS,
    SET_OPERATIONS,
    TIMES,
    UNREAD,
    Node,
    as_set,
    constant,
    is_literal,
    is_product,
    mixed,
    number,
    plain,
    total,
)
from groupwise.rewards.math.grids import bracketed, read_matrix
from groupwise.rewards.math.numbers import UNITS
from groupwise.rewards.math.tokens import (
    CONSTANTS,
    FONTS,
    FUNCTIONS,
    GREEK,
    JOINERS,
    ReadError,
    Token,
    tidy,
    tokenise,
)

MAX_DEPTH = 40
MAX_TOKENS = 400
_COUNTED = ("num", "decimal", "div", "neg", "add", "unit")


def read(text: str) -> Node:
    """The tree of an answer.

    Raises:
        ReadError: not mathematics, or beyond the limits on length and depth.

    Example:
        >>> read("(1, 2]").op, read("x^2 = 4").op, read("\\\\frac{1}{2}").op
        ('interval', 'relation', 'div')
    """
    tokens = tokenise(tidy(text))
    if not tokens or len(tokens) > MAX_TOKENS:
        raise ReadError("empty or too long")
    parser = _Parser(tokens)
    node = parser.items()
    if parser.at < len(tokens):
        raise ReadError(f"unexpected {parser.peek()!r}")
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0

    # -- tokens ---------------------------------------------------------------------------------

    def token(self, ahead: int = 0) -> Token:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else Token("end", "")

    def peek(self) -> str:
        return self.token().text if self.token().kind != "text" else "\0text"

    def take(self) -> Token:
        token = self.token()
        self.at += 1
        return token

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise ReadError(f"{text!r} expected")

    # -- grammar --------------------------------------------------------------------------------

    def items(self) -> Node:
        """Rows of expressions: commas and "and" separate, semicolons separate the rows."""
        rows: list[list[Node]] = [[self.relation()]]
        marks: set[str] = set()
        while mark := self._separator():
            marks.add(mark)
            if mark == ";" and self.rows_matter():
                rows.append([])
            rows[-1].append(self.relation())
        if len(rows) == 1 and len(rows[0]) > 1:
            word = marks.pop() if len(marks) == 1 and marks <= JOINERS else None
            return Node("list", tuple(rows[0]), word)
        found = [row[0] if len(row) == 1 else Node("list", tuple(row)) for row in rows]
        return found[0] if len(found) == 1 else Node("list", tuple(found))

    def rows_matter(self) -> bool:
        return any(token.text == "," for token in self.tokens)

    def _separator(self) -> str:
        """The separator that stands here, the strongest of several; empty where there is none."""
        start = self.at
        while self.token().text in (",", ";", *JOINERS):
            self.at += 1
        marks = [token.text for token in self.tokens[start : self.at]]
        if marks and self.token().kind == "end":
            raise ReadError("a list ends in a separator")
        return ";" if ";" in marks else marks[0] if marks else ""

    def relation(self) -> Node:
        first = self.sets()
        parts, signs = [first], []
        while self.peek() in RELATIONS:
            signs.append(RELATIONS[self.take().text])
            parts.append(self.sets())
        if not signs:
            return first
        return Node("relation", tuple(parts), tuple(signs))

    def sets(self) -> Node:
        braced = self.peek() == "{"
        left = self.ratio()
        while self.peek() in SET_OPERATIONS:
            operation = SET_OPERATIONS[self.take().text]
            left = as_set(left, braced)
            braced = self.peek() == "{"
            left = Node(operation, (left, as_set(self.ratio(), braced)))
        return left

    def ratio(self) -> Node:
        parts = [self.sum()]
        while self.peek() == ":":
            self.take()
            parts.append(self.sum())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def sum(self) -> Node:
        left = self.product()
        while self.peek() in ("+", "-", "\\pm", "\\mp"):
            sign = self.take().text
            right = self.product()
            if sign in ("\\pm", "\\mp"):
                left = Node("pm", (left, right), 1 if sign == "\\pm" else -1)
            else:
                left = total(left, sign, right)
        return left

    def product(self) -> Node:
        left = self.signed()
        while True:
            text = self.peek()
            if text in TIMES or text in OVER:
                self.take()
                left = Node("mul" if text in TIMES else "div", (left, self.signed()))
            elif self._starts_factor():
                left = self._implicit(left)
            else:
                return left

    def _implicit(self, left: Node) -> Node:
        """Two factors side by side; a whole number before a fraction is a mixed number."""
        token, previous = self.token(), self.tokens[self.at - 1]
        if token.kind == "text" or self._is_unit(left):
            return Node("unit", (left,), self._unit())
        after_number = previous.kind == "num" and is_literal(left)
        right = self.power()
        if token.kind == "num" and previous.kind == "num" and self.ends_in_power(left, right):
            return Node("mul", (left, right))
        if token.kind == "num" and previous.kind == "num":
            if not (after_number and token.spaced and right.op == "num" and self.peek() == "/"):
                raise ReadError("two numbers side by side")
            self.take()
            right = Node("div", (right, self.postfix()))
        return mixed(left, right) if after_number else Node("mul", (left, right))

    @staticmethod
    def ends_in_power(left: Node, right: Node) -> bool:
        """2^6 3^5: a power, then another one."""
        last = left.args[1] if left.op == "mul" else left
        return last.op == right.op == "pow"

    def _is_unit(self, left: Node) -> bool:
        """A word after a number: 5 cm, 12 apples."""
        name = self.token().text
        if self.token().kind != "word" or left.op not in _COUNTED:
            return False
        return len(name) > 1 and (name in UNITS or not is_product(name))

    def _unit(self) -> str:
        """A unit written as text, with its power."""
        name = self.take().text
        if self.peek() == "^" and self.token(1).kind in ("num", "op"):
            self.take()
            return f"{name}^{plain(self.argument())}"
        return name

    def _starts_factor(self) -> bool:
        token = self.token()
        if token.kind in ("num", "text", "word"):
            return token.text not in JOINERS
        if token.text == "|":
            return self.bars == 0
        if token.kind == "cmd":
            known = RELATIONS.keys() | SET_OPERATIONS.keys() | TIMES | OVER | CLOSERS
            return token.text not in known | {"\\pm", "\\mp", "\\text"}
        return token.text in ("(", "[", "{")

    def signed(self) -> Node:
        sign = self.peek()
        if sign in ("+", "-", "\\pm", "\\mp"):
            self.take()
            inner = self.deeper(self.signed)
            if sign in ("\\pm", "\\mp"):
                return Node("pm", (number("0"), inner), 1 if sign == "\\pm" else -1)
            return inner if sign == "+" else Node("neg", (inner,))
        return self.power()

    def power(self) -> Node:
        base = self.postfix()
        if self.peek() in ("^", "**"):
            self.take()
            exponent = self.argument(signed=True)
            result = Node("pow", (base, exponent))
            return self._postfix_of(result)
        return base

    def postfix(self) -> Node:
        return self._postfix_of(self.primary())

    def _postfix_of(self, node: Node) -> Node:
        while True:
            text = self.peek()
            if text == "!" and (self.token(1).text != "=" or self.token(1).spaced):
                node = Node("factorial", (node,))
            elif text == "%":
                node = Node("percent", (node,))
            elif text == "\\degree":
                node = Node("degree", (node,))
            elif text == "'":
                node = Node("prime", (node,))
            else:
                return node
            self.take()

    def argument(self, *, signed: bool = False) -> Node:
        """What follows `^`, `_`, `\\frac` or `\\sqrt`: a braced group, or one token."""
        token = self.token()
        if token.text == "{":
            return self.group("{", "}")
        if token.text in ("+", "-") and signed:
            self.take()
            inner = self.argument(signed=True)
            return Node("neg", (inner,)) if token.text == "-" else inner
        if token.kind == "num" and len(token.text) > 1 and self.latex_digits():
            self.tokens[self.at] = Token("num", token.text[1:])
            return Node("num", (), Fraction(int(token.text[0])))
        base = self.primary()
        if signed and self.peek() in ("^", "**"):
            self.take()
            return Node("pow", (base, self.argument(signed=True)))
        return self._postfix_of(base) if signed and self.peek() == "!" else base

    def latex_digits(self) -> bool:
        """`\\frac12` and `\\sqrt34`: one digit belongs to the command."""
        previous = self.tokens[self.at - 1]
        before = self.tokens[self.at - 2] if self.at > 1 else Token("end", "")
        pairs = ("\\frac", "\\binom")
        return previous.text in (*pairs, "\\sqrt") or before.text in pairs

    def group(self, opening: str, closing: str) -> Node:
        self.expect(opening)
        bars, self.bars = self.bars, 0
        inner = self.items()
        self.bars = bars
        self.expect(closing)
        return Node("set", inner.args) if opening == "{" and inner.op == "list" else inner

    # -- primaries ------------------------------------------------------------------------------

    def deeper(self, rule: Callable[[], Node]) -> Node:
        """Apply a rule one level down."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ReadError("too deep")
        node = rule()
        self.depth -= 1
        return node

    def primary(self) -> Node:
        return self.deeper(self._primary)

    def _primary(self) -> Node:
        token = self.token()
        if token.kind == "num":
            self.take()
            return self._based(number(token.text))
        if token.kind == "text":
            return Node("text", (), self.take().text)
        if token.kind == "word":
            return self._word()
        if token.kind == "cmd":
            return self._command(self.take().text)
        if token.text in ("(", "["):
            return self._bracket()
        if token.text == "{":
            return self.group("{", "}")
        if token.text == "|":
            return self._bars("|", "abs")
        raise ReadError(f"unexpected {token.text!r}")

    def _bars(self, closing: str, op: str) -> Node:
        self.take()
        bars, self.bars = self.bars, 1
        inner = self.sum()
        self.bars = bars
        self.expect(closing)
        return Node(op, (inner,))

    def _based(self, node: Node) -> Node:
        """204_5: digits in a base."""
        if self.peek() == "_" and node.op == "num":
            self.take()
            base = self.argument()
            return Node("based", (base,), str(node.value))
        return node

    def _bracket(self) -> Node:
        opening = self.take().text
        bars, self.bars = self.bars, 0
        if self.peek() in (")", "]"):
            self.take()
            return Node("tuple")
        inner = self.items()
        self.bars = bars
        closing = self.take().text
        if closing not in (")", "]"):
            raise ReadError("a bracket is never closed")
        if inner.op != "list":
            return inner
        return bracketed(inner, (opening == "[", closing == "]"))

    def _word(self) -> Node:
        token = self.take()
        name = token.text
        if name in FUNCTIONS:
            return self._function(name)
        if name in CONSTANTS:
            return constant(name)
        if name in GREEK or len(name) == 1:
            return self._symbol(name)
        if is_product(name):
            letters = [Token("word", letter) for letter in name]
            self.tokens[self.at - 1 : self.at] = letters
            self.at -= 1
            return self._word()
        return Node("text", (), name)

    def _symbol(self, name: str) -> Node:
        node = Node("symbol", (), name)
        if self.peek() == "_":
            self.take()
            node = Node("indexed", (self.argument(),), name)
        if self.peek() == "(" and name in "fghFGHPQ" and not self.token().spaced:
            inner = self._bracket()
            args = inner.args if inner.op == "tuple" else (inner,)
            return Node("call", (node, *args))
        return node

    def _command(self, command: str) -> Node:
        name = command[1:]
        if name == "frac":
            top = self.argument()
            return Node("div", (top, self.argument()))
        if name == "binom":
            top = self.argument()
            return Node("binomial", (top, self.argument()))
        if name in ("sum", "prod"):
            return self._series(name)
        if name in FUNCTIONS:
            return self._function(name)
        if name in CONSTANTS:
            return constant(name)
        if name in GREEK:
            return self._symbol(name)
        if name in ("emptyset", "varnothing"):
            return Node("set")
        if name.startswith("mathbb"):
            return Node("reals") if name == "mathbbR" else Node("symbol", (), name)
        if name == "{":
            return self._braces()
        if name in BRACKETS:
            closing, op = BRACKETS[name]
            self.at -= 1
            if op != "tuple":
                return self._bars(closing, op)
            self.take()
            inner = self.items()
            self.expect(closing)
            return Node("tuple", inner.args if inner.op == "list" else (inner,))
        if name == "begin":
            return read_matrix(self)
        if name in FONTS:
            return self.argument()
        if name.isalpha() and name not in UNREAD:
            return self._symbol(name)
        raise ReadError(f"unknown command {command}")

    def _braces(self) -> Node:
        if self.peek() == "\\}":
            self.take()
            return Node("set")
        inner = self.items()
        if self.peek() in ("|", "\\mid", ":"):
            raise ReadError("sets by condition are not read")
        self.expect("\\}")
        return Node("set", inner.args if inner.op == "list" else (inner,))

    def _function(self, name: str) -> Node:
        index = exponent = None
        if name == "sqrt" and self.peek() == "[":
            self.take()
            index = self.sum()
            self.expect("]")
        while self.peek() in ("_", "^"):
            if self.take().text == "_":
                index = self.argument()
            else:
                exponent = self.argument(signed=True)
        if self.peek() in ("(", "{", "["):
            inner = self._bracket() if self.peek() != "{" else self.group("{", "}")
            args = inner.args if inner.op in ("tuple", "set") else (inner,)
        elif name == "sqrt":
            args = (self.argument(),)
        else:
            args = (self._bare_argument(),)
        args = args if index is None else (*args, index)
        node = Node("function", args, (name, index is not None))
        if exponent is None:
            return node
        inverse = exponent.op == "neg" and exponent.args[0].value == 1
        if inverse and "arc" + name in FUNCTIONS:
            return Node("function", args, ("arc" + name, False))
        return Node("pow", (node, exponent))

    def _bare_argument(self) -> Node:
        """`\\sin 2x`: the factors up to the next sign, operator or function."""
        inner = self.signed()
        while self._starts_factor() and self.token().kind != "text":
            word = self.token().text.lstrip("\\")
            if word in FUNCTIONS or self.token().text in ("(", "["):
                break
            inner = Node("mul", (inner, self.power()))
        return inner

    def _series(self, name: str) -> Node:
        lower = upper = None
        while self.peek() in ("_", "^"):
            if self.take().text == "_":
                lower = self.argument()
            else:
                upper = self.argument()
        if lower is None or upper is None or lower.op != "relation" or lower.args[0].op != "symbol":
            raise ReadError("a series without limits")
        body = self.product()
        return Node(name, (lower.args[1], upper, body), lower.args[0].value)
