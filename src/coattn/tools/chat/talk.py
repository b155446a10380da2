"""The conversation: lines in, pieces of text out, and a few commands."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from coattn.engine.sampling.params import SamplingParams
from coattn.errors import CoattnError, ConfigError
from coattn.text import decode, read_bytes
from coattn.tools.chat.partner import Messages, Partner
from coattn.tools.chat.server import Server

HELP = """/file PATH    put a text file before your next message
/stats        what the last answer took
/reset        forget the conversation
/help         this
/quit         leave (or Ctrl-D)
A line that ends with \\ goes on in the next; lines between \"\"\" and \"\"\" are one. Ctrl-C stops an answer."""


class Talk:
    """read: a line for a prompt, EOFError at the end, CoattnError for one that is no text; write: the answer; tell:
    everything else, a line."""

    def __init__(
        self,
        partner: Partner | Server,
        asked: SamplingParams,
        system: str | None,
        read: Callable[[str], str],
        write: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.partner, self.asked = partner, asked
        self._read, self._write, self._tell = read, write, tell
        self._begin: Messages = [] if system is None else [{"role": "system", "content": system}]
        self.messages: Messages = list(partner.messages) or list(self._begin)
        self._files: list[str] = []
        self.failed = 0

    def run(self) -> None:
        """Until the end of the input, or /quit. `failed` counts the lines that could not be done."""
        while True:
            try:
                said = self._message()
                if said.strip() in ("/quit", "/exit"):
                    return
                self._do(said)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._tell("(Ctrl-D or /quit leaves)")
            except CoattnError as error:
                self.failed += 1
                self._tell(f"error: {error}")
                if error.hint:
                    self._tell(f"hint: {error.hint}")

    def _message(self) -> str:
        """One message, of one line or several."""
        line = self._read("> ")
        if line.strip() == '"""':
            lines = []
            while (line := self._read("... ")).strip() != '"""':
                lines.append(line)
            return "\n".join(lines)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read("... "))
        return "\n".join(lines)

    def _do(self, said: str) -> None:
        if not said.strip():
            return
        if not said.startswith("/"):
            self._ask(said)
            return
        name, _, rest = said.strip().partition(" ")
        if name == "/file":
            if not rest.strip():
                raise ConfigError("/file needs a path after it.", "/help shows which.")
            self._files.append(decode(read_bytes(Path(rest.strip()).expanduser()), rest))
            self._tell(f"{rest.strip()} goes before your next message")
        elif name == "/stats":
            self._tell(self.partner.stats())
        elif name == "/reset":
            self.messages, self._files = list(self._begin), []
            self._tell("forgotten")
        elif name == "/help":
            self._tell(HELP)
        else:
            raise ConfigError(f"There is no command {name}.", "/help lists those there are.")

    def _ask(self, said: str) -> None:
        asked: Messages = [*self.messages, {"role": "user", "content": "\n\n".join([*self._files, said])}]
        pieces: list[str] = []
        try:
            with closing(self.partner.answer(asked, self.asked)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    self._write(piece)
        except KeyboardInterrupt:
            self._tell("\n(stopped)")
        except CoattnError:
            if pieces:
                self._write("\n")
            raise
        self._write("\n")
        # what failed is not part of the conversation, and can be asked again
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        self._files = []
