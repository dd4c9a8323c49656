package switchyard.client;

import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * Options of one call.
 *
 * @param deadline time after which the call fails and the engine stops; null: none
 * @param headers additional headers, such as {@code X-Switchyard-Class} for another class or {@code X-Session-Id}
 * @param resumes an answer that breaks off is requested again, at the next region. The application gets what follows,
 *     if the repeat begins with the same text, and {@link BrokenOffException} otherwise. Useful with temperature 0.
 *     Both requests are charged
 */
public record CallOptions(Duration deadline, Map<String, String> headers, boolean resumes) {
    public static final CallOptions NONE = new CallOptions(null, Map.of(), false);

    public CallOptions {
        headers = Map.copyOf(headers);
        if (deadline != null && deadline.isNegative()) {
            throw new IllegalArgumentException("a deadline is a positive time");
        }
    }

    public static CallOptions within(Duration deadline) {
        return NONE.deadline(deadline);
    }

    /** Returns these options with another deadline. */
    public CallOptions deadline(Duration limit) {
        return new CallOptions(limit, headers, resumes);
    }

    /** Returns these options with one more header. */
    public CallOptions header(String name, String value) {
        var more = new LinkedHashMap<>(headers);
        more.put(name, value);
        return new CallOptions(deadline, more, resumes);
    }

    /** Returns these options with answers that are requested again if they break off. */
    public CallOptions resuming() {
        return new CallOptions(deadline, headers, true);
    }
}
