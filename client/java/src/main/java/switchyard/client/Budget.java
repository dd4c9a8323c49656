package switchyard.client;

import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.regex.Pattern;

/** One limit of a key, per minute. {@code reset}: time until all of it is available again. */
public record Budget(long limit, long remaining, Duration reset) {
    private static final Pattern PART = Pattern.compile("([0-9]{1,12}(?:\\.[0-9]{1,12})?)(ms|h|m|s)");
    private static final Map<String, Double> UNITS_S = Map.of("ms", 0.001, "s", 1.0, "m", 60.0, "h", 3600.0);

    /** Reads {@code x-ratelimit-*}; a limit that is not set on the key is absent. */
    static Map<String, Budget> allOf(Map<String, String> headers) {
        var found = new HashMap<String, Budget>();
        for (var kind : new String[] {"requests", "tokens"}) {
            var limit = headers.getOrDefault("x-ratelimit-limit-" + kind, "");
            var left = headers.getOrDefault("x-ratelimit-remaining-" + kind, "");
            if (limit.matches("[0-9]{1,18}") && left.matches("[0-9]{1,18}")) {
                double seconds = PART.matcher(headers.getOrDefault("x-ratelimit-reset-" + kind, "")).results()
                        .mapToDouble(each -> Double.parseDouble(each.group(1)) * UNITS_S.get(each.group(2))).sum();
                var reset = Duration.ofNanos((long) (seconds * 1e9));
                found.put(kind, new Budget(Long.parseLong(limit), Long.parseLong(left), reset));
            }
        }
        return Map.copyOf(found);
    }
}
