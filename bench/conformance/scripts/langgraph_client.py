"""LangGraph: a graph of a model and its tool, by hand."""

from typing import Any

from cases import BASE_URL, KEY, MODEL, QUESTION, features, main
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from shapes import last_call, weather


def graph(model: str = MODEL, key: str = KEY) -> Any:
    chat = ChatOpenAI(model=model, base_url=BASE_URL, api_key=key, max_retries=0, timeout=120, max_tokens=128)

    def call(state: MessagesState) -> dict[str, list[Any]]:
        was_called = any(isinstance(message, AIMessage) for message in state["messages"])
        bound = chat.bind_tools([weather], tool_choice="none" if was_called else "weather")
        return {"messages": [bound.invoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("model", call)
    built.add_node("tools", ToolNode([weather]))
    built.add_edge(START, "model")
    built.add_conditional_edges("model", tools_condition)
    built.add_edge("tools", "model")
    return built.compile()


def asked(model: str = MODEL, key: str = KEY) -> str:
    return graph(model, key).invoke({"messages": [("user", QUESTION)]})["messages"][-1].content


def stream() -> str:
    pieces = graph().stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    return "".join(str(piece.content) for piece, _ in pieces)


def tools() -> dict[str, str]:
    asked()
    return last_call()


features(chat=asked, stream=stream, tools=tools, errors=asked)
main()
