package switchyard.client;

import java.util.Map;
import java.util.Optional;
import java.util.Set;

/**
 * The last known state of a near-real-time request.
 *
 * @param callbackSecret only in the response that accepts the request; empty otherwise
 */
public record Pending(String id, String status, Map<String, Object> json, String callbackSecret) {
    private static final Set<String> ENDED = Set.of("done", "failed", "expired", "cancelled");

    static Pending of(Map<String, Object> json) {
        return new Pending(Json.text(json, "id"), Json.text(json, "status"), json, Json.text(json, "callback_secret"));
    }

    public boolean hasEnded() {
        return ENDED.contains(status);
    }

    /** Returns the engine's answer, once {@code status} is done. */
    public Optional<Answer> answer() {
        var body = Json.at(json, "response", "body");
        return status.equals("done") && body instanceof Map<?, ?>
                ? Optional.of(new Answer(Json.object(body), Map.of(), 1)) : Optional.empty();
    }

    @Override
    public String toString() {
        return "Pending[id=" + id + ", status=" + status + "]";
    }
}
