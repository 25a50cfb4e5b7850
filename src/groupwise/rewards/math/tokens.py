"""LaTeX and plain mathematical text cut into tokens. Nothing here evaluates anything."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

MAX_LENGTH = 2000

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∗": "*", "÷": r"\div ", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "∖": r"\setminus ",
    "⁄": "/", "∠": r"\angle ", "△": r"\triangle ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]",
    "′": "'", "’": "'", "，": ",", "（": "(",
    "）": ")", "：": ":", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "ℝ": r"\mathbb{R}",
    "\f": r"\f", "\b": r"\b", "→": r"\to ",
}  # fmt: skip
_UNICODE_TABLE = str.maketrans(_UNICODE)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SCRIPTS = re.compile(
    r"(?P<up>[⁰¹²³⁴-⁹⁺⁻ⁿ]+)|(?P<down>[₀-₉]+)|(?P<part>[½⅓⅔¼¾⅕-⅞])|√\s*(?P<root>\d+)"
)
_POWER_OF_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_MINUS_SET = re.compile(r"(?<=[R}\])]) \\ ?(?=\\?\{)")  # R \ {1}

_SIZES = re.compile(
    r"\\(?:left|right|[bB]ig{1,2}[lrm]?|middle|displaystyle|textstyle|scriptstyle|limits|nolimits"
    r"|rm|bf|it|mathstrut|phantom\{[^{}]*\})(?![a-zA-Z])"
)
_EMPTY_DELIMITER = re.compile(r"\\(?:left|right)\s*\.")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:>\s]|q?quad|hspace\{[^{}]*\}|thinspace|enspace)|~")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z]{2})")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|sc)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathcal|mathbb"
    r"|boldsymbol|bm|operatorname\*?|emph|textnormal|textup|underline|overline|vec|hat|bar"
    r"|boxed|fbox|overrightarrow|rm)\s*\{"
)
_THOUSANDS = re.compile(
    r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\!\s*,|\\,)\s*(?:\\!)?\s*(?=\d{3}(?!\d))"
)

_SPACED_THOUSANDS = re.compile(r"(?<=\d) (?=\d{3}(?!\d))(?!\d{3}\s*/)")

_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d{1,20})\}")

_TOKEN = re.compile(
    r"""(?P<num>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+(?![a-zA-Z\d]))?
          |\.\d+)
      | (?P<cmd>\\[a-zA-Z]+\*?|\\.)
      | (?P<word>[a-zA-Z]+)
      | (?P<op>\*\*|<=|>=|!=|<>|->|=>|\.\.\.|[^\s])""",
    re.VERBOSE,
)

FONTS = {"mathbf", "boldsymbol", "bm", "mathit", "vec", "hat", "bar", "overline", "underline",
         "overrightarrow", "mathcal", "mathsf", "boxed", "fbox"}  # fmt: skip


class ReadError(ValueError):
    """The text is not mathematics that this reader knows."""


@dataclass(frozen=True, slots=True)
class Token:
    """`kind` is num, cmd, word, op or text; `spaced` says that white space came before it."""

    kind: str
    text: str
    spaced: bool = False


def tidy(text: str) -> str:
    """The text without what only changes its looks: delimiters, sizes, spacing, math mode.

    Example:
        >>> tidy("$\\\\left( \\\\dfrac{1}{2},\\\\, 16{,}384 \\\\right)$.")
        '( \\\\frac{1}{2}, 16384 )'
    """
    text = _SCRIPTS.sub(_script, text).translate(_UNICODE_TABLE).rstrip("\\ ")
    text = _MINUS_SET.sub(r"\\setminus ", _POWER_OF_TEN.sub(r"\\times ", text))
    if "begin{" not in text:
        text = _DOUBLED.sub(r"\\", text)  # escaped twice on the way through a file
    text = re.sub(r"(?<!\\)\\([\[\]()])", " ", text)
    text = _THOUSANDS.sub("", text)
    text = _SPACED_THOUSANDS.sub("", text)
    text = text.replace(r"\!", "").replace(r"\$", " ").replace("$", " ").replace("\\%", "%")
    text = _EMPTY_DELIMITER.sub(" ", text)
    text = _SIZES.sub(" ", text)
    text = _SPACES.sub(" ", text)
    text = _FRACTIONS.sub(r"\\frac", text)
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = text.replace(r"\lbrack", "[").replace(r"\rbrack", "]")
    text = _REPEATING.sub(_repeating, text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\degree ", text)
    text = " ".join(text.split()).strip("*` ")
    text = re.sub(r"^=\s*(?=[^=\s])", "", text)
    end = len(text)
    while end and (text[end - 1] in ",;: " or (text[end - 1] == "." != text[end - 2 : end - 1])):
        end -= 1
    return text[:end]


def _script(match: re.Match[str]) -> str:
    """Raised and lowered digits, fractions in one character, and numbers under a radical sign."""
    if match["up"]:
        return f"^{{{match['up'].translate(_RAISED)}}}"
    if match["down"]:
        return f"_{{{match['down'].translate(_LOWERED)}}}"
    if match["root"]:
        return rf"\sqrt{{{match['root']}}}"
    top, _, bottom = unicodedata.normalize("NFKC", match["part"]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction that it is."""
    whole, fixed, period = match.groups()
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{top}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def tokenise(text: str) -> list[Token]:
    """Tokens of tidied text.

    Raises:
        ReadError: longer than `MAX_LENGTH`, or a brace that is never closed.
    """
    if len(text) > MAX_LENGTH:
        raise ReadError("too long")
    tokens: list[Token] = []
    depth = at = 0
    spaced = False
    while at < len(text):
        if text[at].isspace():
            spaced, at = True, at + 1
            continue
        styled = _TEXT.match(text, at)
        if styled:
            end = closing(text, styled.end() - 1)
            tokens += _styled(styled[0], text[styled.end() : end], spaced)
            at, spaced = end + 1, False
            continue
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ReadError(f"unexpected {text[at]!r}")
        piece = match[0]
        if match.lastgroup == "num" and (depth or piece[0] == "0") and "," in piece:
            piece = piece[: piece.index(",")]  # inside brackets a comma separates
        depth += (piece in ("(", "[", r"\{")) - (piece in (")", "]", r"\}"))
        written = piece if piece == "," else piece.replace(",", "")
        tokens.append(Token(match.lastgroup, written, spaced))
        at, spaced = at + len(piece), False
    return tokens


def _styled(command: str, content: str, spaced: bool) -> list[Token]:
    """Tokens of `\\text{…}` and its relatives: fonts vanish, words become one text token."""
    name = command.strip("\\{ \t\n*")
    content = content.strip()
    if name == "mathbb":
        return [Token("cmd", "\\mathbb" + content, spaced)]
    if name in FONTS:
        return [Token("op", "{", spaced), *tokenise(content), Token("op", "}")]
    if content in FUNCTIONS:
        return [Token("word", content, spaced)]
    if name in ("mathrm", "operatorname", "rm") or re.fullmatch(r"[\d.,/ +-]+", content):
        unit = re.fullmatch(r"[a-zA-Z]{2,}(\^\d)?|[a-zA-Z]+/[a-zA-Z]+(\^\d)?", content)
        if name == "mathrm" and unit and content not in KNOWN:
            return [Token("text", content, spaced)]
        inner = tokenise(content)
        return [Token("op", "{", spaced), *inner, Token("op", "}")] if len(inner) != 1 else inner
    return [Token("text", content.strip(" ~"), spaced)] if content else []


def closing(text: str, opening: int) -> int:
    """Index of the brace that closes the one at `opening`; escaped braces do not count.

    Raises:
        ReadError: there is none.
    """
    depth, at = 0, opening
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
        at += 1
    raise ReadError("a brace is never closed")


FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
    "arccot", "arcsec", "arccsc", "arcsinh", "arccosh", "arctanh", "arsinh", "arcosh", "artanh",
    "arccoth", "arcsech", "arccsch", "arcoth", "arsech", "arcsch", "acoth", "asech", "acsch",
    "sech", "csch", "coth", "ln", "log", "lg", "exp", "gcd", "lcm", "max", "min", "det",
    "asin", "acos", "atan", "asinh", "acosh", "atanh", "sqrt", "abs", "arg", "deg", "Re", "Im",
}  # fmt: skip
CONSTANTS = {"pi", "infty", "inf", "infinity", "oo", "e", "i"}
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
    "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi",
    "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi",
    "Omega", "ell", "hbar",
}  # fmt: skip
JOINERS = {"and", "or"}
KNOWN = FUNCTIONS | CONSTANTS | GREEK | JOINERS
