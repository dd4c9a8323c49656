package switchyard.client;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.regex.Pattern;

/** A refusal: status and error of the ingress, of a cell or of the control plane. */
public final class ApiException extends SwitchyardException {
    private static final long serialVersionUID = 1L;
    private static final Pattern SECONDS = Pattern.compile("[0-9]{1,9}(\\.[0-9]{1,9})?");
    private static final int LONGEST_TEXT = 500;

    private final int status;
    private final String text;
    private final String type;
    private final String code;
    private final String param;
    private final TreeMap<String, String> headers;

    ApiException(int status, byte[] body, Map<String, String> headers) {
        this(status, errorOf(body), textOf(body), headers);
    }

    private ApiException(int status, Map<String, Object> error, String body, Map<String, String> headers) {
        super(sentence(status, error, body), null);
        this.status = status;
        this.text = messageOf(error, body);
        this.type = member(error, "type");
        this.code = member(error, "code");
        this.param = member(error, "param");
        this.headers = new TreeMap<>(headers);
    }

    /** The HTTP status; 200 for an error inside of a stream. */
    public int status() {
        return status;
    }

    /** The server's text, without status and code. */
    public String text() {
        return text;
    }

    public Optional<String> type() {
        return Optional.ofNullable(type);
    }

    /** What programs compare, such as {@code model_not_found}. */
    public Optional<String> code() {
        return Optional.ofNullable(code);
    }

    /** The member of the body that is wrong. */
    public Optional<String> param() {
        return Optional.ofNullable(param);
    }

    /** Returns when a retry may help; empty if it does not help or the time is unknown. */
    public Optional<Duration> retryAfter() {
        return retryAfter(headers);
    }

    public String requestId() {
        return headers.getOrDefault("x-request-id", "");
    }

    /** Limits of the key, by {@code requests} and {@code tokens}. */
    public Map<String, Budget> budgets() {
        return Budget.allOf(headers);
    }

    static Optional<Duration> retryAfter(Map<String, String> headers) {
        for (var unit : new String[] {"retry-after-ms", "retry-after"}) {
            var value = headers.getOrDefault(unit, "");
            if (SECONDS.matcher(value).matches()) {
                double seconds = Double.parseDouble(value) * (unit.endsWith("ms") ? 0.001 : 1.0);
                return Optional.of(Duration.ofNanos((long) (seconds * 1e9)));
            }
        }
        return Optional.empty();
    }

    private static String member(Map<String, Object> error, String name) {
        return error.get(name) == null ? null : error.get(name).toString();
    }

    private static Map<String, Object> errorOf(byte[] body) {
        try {
            var found = Json.at(Json.parse(body), "error");
            if (found instanceof Map<?, ?>) {
                return Json.object(found);
            }
            return found == null ? Map.of() : Map.of("message", found);
        } catch (Json.Malformed ignored) {
            return Map.of();
        }
    }

    private static String textOf(byte[] body) {
        return new String(body, 0, Math.min(body.length, LONGEST_TEXT), StandardCharsets.UTF_8);
    }

    private static String messageOf(Map<String, Object> error, String body) {
        var message = error.get("message");
        return message == null || message.equals("") ? body : message.toString();
    }

    private static String sentence(int status, Map<String, Object> error, String body) {
        var code = error.get("code") != null ? error.get("code") : error.get("type");
        return status + " " + (code == null ? "refused" : code) + ": " + messageOf(error, body);
    }
}
