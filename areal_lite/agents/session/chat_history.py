"""The recorded answers of one session, and the search for the one that a new request continues.

Invariant: a token that was sampled is never tokenized again. So the history is lists of ids, and messages are only the
key under which a list is found: a tree of message keys, with an answer at some nodes. A request continues the deepest
answer on its path; what follows is rendered and appended to that answer's ids. Without such an answer it is rendered
whole, and if it then has an assistant message, it is a fork: the model's own tokens became text on the way.

Designs that look right and are not:

- One list of ids that each request extends. Agents call concurrently, hand over to sub-agents, sample ``n`` answers,
  retry, and shorten their history. Each of these leaves a branch, and the next request may continue any of them.
- Comparing rendered text with recorded text. Templates drop earlier reasoning, strip text and reformat a call's
  arguments, so an unchanged history would fork at its second turn.
- Matching the raw messages alone. SDKs rewrite them: null for "", reasoning left out, JSON with other spaces. So keys
  are normalised, and an answer is also found by its key without reasoning.
- Parsing the whole history in each request. A conversation of a hundred turns would cost the square of its length, on
  the one event loop of all episodes. So the latest requests are kept, as bytes and as parsed, and only what follows
  them is parsed. Their number is bounded: an agent with more conversations at once pays for parsing, nothing else.

Concurrent requests of a session need no lock: finding and recording do not await, and a node is only ever added. Two
requests that continue one answer at the same time both find it, and both record a child. What can still fail: an agent
that sends the same messages to two calls and then continues with the first one's text is matched by that text, so if
both answers read alike, the later one's ids are continued. Both are on policy; neither is trained twice.
"""

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Any, Literal
from areal_lite.agents.session.chat_request import ChatRequest, Conversation, parse_message
from areal_lite.api.engine_api import OLDER_POLICY
from areal_lite.api.interaction import InteractionWithTokenLogpReward

Style = Literal["individual", "concat"]
Interactions = dict[str, InteractionWithTokenLogpReward]
_CONVERSATIONS_KEPT = 8


class ChatHistory:
    def __init__(self) -> None:
        self.interactions: Interactions = {}
        self._nodes: dict[tuple[Hashable, Hashable], int] = {}
        """The tree: the node after a node and the key of a message. A root is the render key of requests."""
        self._answers: dict[Hashable, InteractionWithTokenLogpReward] = {}
        self._conversations: deque[Conversation] = deque(maxlen=_CONVERSATIONS_KEPT)
        self._untemplated: list[tuple[str, InteractionWithTokenLogpReward]] = []
        """Answers to prompts without template, with the text of prompt and answer."""

    def cut(self, body: bytes) -> tuple[bytes, Conversation | None]:
        """Return a request's body without the messages of an earlier body that it repeats, and that conversation."""
        for earlier in sorted(self._conversations, key=lambda one: len(one.raw), reverse=True):
            if earlier.known_body is not None and (rest := earlier.known_body.cut_from(body)) is not None:
                return rest, earlier
        return body, None

    def find(self, raw: list[Any]) -> Conversation | None:
        """Return the longest earlier conversation that the messages of a request begin with."""
        begun = [one for one in self._conversations if raw[: len(one.raw)] == one.raw]
        return max(begun, key=lambda one: len(one.raw), default=None)

    def longest_recorded(self, request: ChatRequest) -> tuple[InteractionWithTokenLogpReward | None, int]:
        """Return the answer that ends the longest recorded prefix of a request, and the prefix's length in messages."""
        path = self._path(request)
        depth = next((depth for depth in range(len(path) - 1, 0, -1) if path[depth] in self._answers), 0)
        return self._answers.get(path[depth]), depth

    def longest_untemplated(
        self, prompt: str | list[int]
    ) -> tuple[InteractionWithTokenLogpReward | None, str | list[int]]:
        """Return the answer that a prompt without template continues exactly, and the rest of the prompt."""
        parent, rest, longest = None, prompt, 0
        for text, answer in self._untemplated:
            response = answer.model_response
            length = response.input_len + response.output_len
            if length <= longest:
                continue
            known = text if isinstance(prompt, str) else response.input_tokens + response.output_tokens
            if prompt[: len(known)] == known:
                parent, rest, longest = answer, prompt[len(known) :], length
        return parent, rest

    def tokens_left(self, prompt: list[int]) -> int:
        """Return how many tokens of the closest earlier conversation a prompt does not share."""
        shared, left = -1, 0
        in_common: dict[int, int] = {}  # of the prompt and each list of ids
        for answer in self.interactions.values():
            before, sampled = answer.model_response.prompt, answer.model_response.output_tokens
            ids, length = id(before.ids), before.length
            if ids not in in_common:
                in_common[ids] = shared_length(prompt, before.ids)
            common = min(in_common[ids], length)
            if common == length:
                common += shared_length(prompt[length : length + len(sampled)], sampled)
            if common > shared:
                shared, left = common, length + len(sampled) - common
        return left

    def record(self, request: ChatRequest, interaction: InteractionWithTokenLogpReward) -> None:
        (answer,) = interaction.output_message_list
        self.interactions[interaction.completion["id"]] = interaction
        path = self._path(request, grows=True)
        _, key = parse_message(answer, "answer")
        end = self._nodes.setdefault((path[-1], key), len(self._nodes))
        self._answers[end] = interaction
        self._nodes.setdefault((path[-1], key[:3]), end)  # a client may leave the reasoning out
        if not any(one.path[-1] == path[-1] for one in self._conversations):
            if request.extends is not None and request.extends in self._conversations:
                self._conversations.remove(request.extends)
            self._conversations.append(replace(request.conversation, path=path))

    def record_untemplated(self, text: str, interaction: InteractionWithTokenLogpReward) -> None:
        """Record the answer to a prompt without template; ``text`` is both."""
        self.interactions[interaction.completion["id"]] = interaction
        self._untemplated.append((text, interaction))

    def export(self, style: Style, agents: Collection[str] | None = None) -> Interactions:
        """Return the sequences to train on, by completion id; the originals stay as they are.

        "individual": every answer is a sequence of its own, its prompt not trained. "concat": every conversation is
        one sequence that trains all its answers; where conversations branch, the earlier one trains what they share,
        so each sampled token is trained once. With ``agents``, only their answers are.
        """

        def trains(answer: InteractionWithTokenLogpReward) -> bool:
            name = answer.model_response.metadata.get("agent")
            return name != OLDER_POLICY and (agents is None or name in agents)

        if style == "individual":
            return {key: replace(answer, concat=False) for key, answer in self.interactions.items() if trains(answer)}
        if style != "concat":
            raise ValueError(f"style is {style!r}: use 'individual' or 'concat'")
        parents = {id(answer.parent) for answer in self.interactions.values()}
        trained: set[int] = set()
        sequences = {}
        for key, leaf in self.interactions.items():
            if id(leaf) in parents:
                continue
            sequence: InteractionWithTokenLogpReward | None = None
            for node in leaf.chain():
                sequence = replace(node, parent=sequence, concat=True, trained=trains(node) and id(node) not in trained)
                trained.add(id(node))
            if sequence is not None and sequence.trained_chain():
                sequences[key] = sequence
        return sequences

    def _path(self, request: ChatRequest, *, grows: bool = False) -> list[Hashable]:
        """Return the nodes of a request from its root on, as far as they are known; all of them if it ``grows``."""
        root, conversation = request.render_key, request.conversation
        path: list[Hashable] = conversation.path.copy() if conversation.path[:1] == [root] else [root]
        for key in conversation.keys[len(path) - 1 :]:
            if (node := self._nodes.get((path[-1], key))) is None:
                if not grows:
                    break
                node = self._nodes[path[-1], key] = len(self._nodes)
            path.append(node)
        return path


def shared_length(first: list[int], second: list[int]) -> int:
    """Return how many ids the two begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices compare without a step of Python for each of 100,000 ids
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
