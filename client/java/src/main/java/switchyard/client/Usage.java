package switchyard.client;

import java.util.Map;
import java.util.Optional;

/** Tokens of one request by its engine; {@code cachedTokens} are those of the prompt that it did not compute. */
public record Usage(long promptTokens, long completionTokens, long cachedTokens) {

    /** Reads the usage of an answer or event of OpenAI's, Responses or Anthropic's API; empty if it has none. */
    static Optional<Usage> of(Map<String, Object> body) {
        for (var holder : new Object[] {body, body.get("response"), body.get("message")}) {
            if (Json.at(holder, "usage") instanceof Map<?, ?> usage && !usage.isEmpty()) {
                return Optional.of(new Usage(
                        first(usage, "prompt_tokens", "input_tokens"),
                        first(usage, "completion_tokens", "output_tokens"),
                        Math.max(Math.max(
                                Json.number(usage, "prompt_tokens_details", "cached_tokens"),
                                Json.number(usage, "input_tokens_details", "cached_tokens")),
                                Json.number(usage, "cache_read_input_tokens"))));
            }
        }
        return Optional.empty();
    }

    private static long first(Map<?, ?> usage, String name, String other) {
        return Json.number(usage, usage.get(name) != null ? name : other);
    }
}
