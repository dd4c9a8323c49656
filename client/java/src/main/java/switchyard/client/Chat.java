package switchyard.client;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The body of {@code /v1/chat/completions}. */
public final class Chat extends Body.Generating<Chat> {
    private final List<Map<String, Object>> messages = new ArrayList<>();
    private final List<Object> tools = new ArrayList<>();

    private Chat(String model) {
        super(model);
        with("messages", messages);
    }

    public static Chat of(String model) {
        return new Chat(model);
    }

    /** Makes a chat with one user message. */
    public static Chat of(String model, String user) {
        return new Chat(model).user(user);
    }

    public Chat system(String content) {
        return message("system", content);
    }

    public Chat user(String content) {
        return message("user", content);
    }

    public Chat assistant(String content) {
        return message("assistant", content);
    }

    /** The answer of a tool that the model called. */
    public Chat toolResult(String callId, String content) {
        return message(Map.of("role", "tool", "tool_call_id", callId, "content", content));
    }

    /** Adds a message with text, or with a list of parts. */
    public Chat message(String role, Object content) {
        var message = new LinkedHashMap<String, Object>();
        message.put("role", role);
        message.put("content", content);
        return message(message);
    }

    /** Adds a message, such as an earlier answer with {@code tool_calls}. */
    public Chat message(Map<String, ?> message) {
        messages.add(new LinkedHashMap<>(message));
        return this;
    }

    /** Adds a function. {@code parameters} is its JSON schema. */
    public Chat tool(String name, String description, Map<String, ?> parameters) {
        var function = Map.of("name", name, "description", description, "parameters", parameters);
        tools.add(Map.of("type", "function", "function", function));
        return with("tools", tools);
    }

    /** The answer is JSON by this schema. */
    public Chat jsonSchema(String name, Map<String, ?> schema) {
        var named = Map.of("name", name, "schema", schema, "strict", true);
        return with("response_format", Map.of("type", "json_schema", "json_schema", named));
    }
}
