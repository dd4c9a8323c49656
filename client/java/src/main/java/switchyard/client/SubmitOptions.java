package switchyard.client;

import java.time.Duration;

/**
 * Options of a near-real-time request; null is the default.
 *
 * @param deadline time limit of its outcome, 15 minutes by default
 * @param callbackUrl where the fleet sends the end of it; see {@link Callbacks}
 * @param sink name of a sink that gets the outcome
 * @param idempotencyKey a default one prevents a retry from creating a second request
 */
public record SubmitOptions(Duration deadline, String callbackUrl, String sink, String idempotencyKey) {
    public static final SubmitOptions NONE = new SubmitOptions(null, null, null, null);

    public SubmitOptions deadline(Duration limit) {
        return new SubmitOptions(limit, callbackUrl, sink, idempotencyKey);
    }

    public SubmitOptions callbackUrl(String url) {
        return new SubmitOptions(deadline, url, sink, idempotencyKey);
    }

    public SubmitOptions sink(String name) {
        return new SubmitOptions(deadline, callbackUrl, name, idempotencyKey);
    }

    public SubmitOptions idempotencyKey(String key) {
        return new SubmitOptions(deadline, callbackUrl, sink, key);
    }
}
