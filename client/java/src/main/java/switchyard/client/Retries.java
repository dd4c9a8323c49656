package switchyard.client;

import java.time.Duration;

/**
 * Bounds of one call.
 *
 * @param attempts maximum attempts, of all regions together
 * @param longestWait maximum {@code Retry-After} to wait for
 * @param rest how long a failed region is tried last
 */
public record Retries(int attempts, Duration longestWait, Duration rest) {
    public static final Retries DEFAULT = new Retries(5, Duration.ofSeconds(30), Duration.ofSeconds(5));

    public Retries {
        if (attempts < 1 || longestWait.isNegative() || rest.isNegative()) {
            throw new IllegalArgumentException("at least one attempt, and no negative time");
        }
    }
}
