"""LangGraph with langchain-openai: a graph of two nodes, the model and its tools."""

from __future__ import annotations
from typing import Any
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import LengthFinishReasonError
from pydantic import BaseModel, ValidationError


class Result(BaseModel):
    result: int


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


class LangGraphAgent:
    """Reward 1 for the right result, 0 for a wrong one or for an answer that breaks its schema.

    Args:
        stream: Whether to stream the answers.
    """

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        access = {"base_url": base_url, "api_key": api_key, "http_async_client": http_client}
        chat = ChatOpenAI(model="default", streaming=self.stream, **access)
        model = chat.bind_tools([multiply], response_format=Result)

        async def ask(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("tools", ToolNode([multiply]))
        graph.add_edge(START, "ask")
        graph.add_conditional_edges("ask", tools_condition)
        graph.add_edge("tools", "ask")
        start: Any = {"messages": [("user", data["question"])]}
        try:
            state = await graph.compile().ainvoke(start, {"recursion_limit": 8})
            return float(Result.model_validate_json(state["messages"][-1].text).result == int(data["answer"]))
        except (GraphRecursionError, LengthFinishReasonError, ValidationError):  # the model's mistake
            return 0.0
