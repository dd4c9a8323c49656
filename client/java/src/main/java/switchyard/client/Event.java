package switchyard.client;

import java.util.Map;
import java.util.Optional;

/** One event of a stream. {@code name}: from its line {@code event}, empty in OpenAI's chats. */
public record Event(String name, Map<String, Object> json) {

    /** Returns the text for the first choice; empty if the event has none. */
    public String text() {
        if (Json.at(json, "choices", 0) instanceof Map<?, ?> choice) {
            var content = Json.text(choice, "delta", "content");
            return content.isEmpty() ? Json.text(choice, "text") : content;
        }
        if (json.get("delta") instanceof String delta) {
            return "response.output_text.delta".equals(json.get("type")) ? delta : "";
        }
        return Json.text(json, "delta", "text");
    }

    public Optional<Usage> usage() {
        return Usage.of(json);
    }
}
