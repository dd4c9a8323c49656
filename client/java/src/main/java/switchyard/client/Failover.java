package switchyard.client;

import java.util.Collection;
import java.util.Comparator;
import java.util.List;
import java.util.OptionalDouble;
import java.util.stream.IntStream;

/**
 * Decides which region a call tries next. The first is home. A failed region comes last for a while, for all calls of
 * the client, and twice as long if it fails again. Pure: time is an argument, in seconds of one clock.
 */
final class Failover {
    /** Send the request to the region with this index, after {@code waitS} seconds. */
    record Attempt(int region, double waitS) {}

    private static final int TOO_MANY_REQUESTS = 429;

    private final int attempts;
    private final double longestWaitS;
    private final double restS;
    private final double[] restsUntil;
    private final int[] failures;

    Failover(int regions, Retries retries) {
        attempts = retries.attempts();
        longestWaitS = retries.longestWait().toNanos() / 1e9;
        restS = retries.rest().toNanos() / 1e9;
        restsUntil = new double[regions];
        failures = new int[regions];
    }

    /** Returns all regions: available ones in the given order, then failed ones, the earliest failure first. */
    synchronized List<Integer> order(double now) {
        return IntStream.range(0, restsUntil.length).boxed()
                .sorted(Comparator.comparingDouble(each -> Math.max(0.0, restsUntil[each] - now))).toList();
    }

    synchronized void answered(int region) {
        restsUntil[region] = 0;
        failures[region] = 0;
    }

    /** Marks a region that sent no byte of an answer as failed. */
    synchronized void failed(int region, double now) {
        double rests = restS * Math.pow(2, failures[region]);
        failures[region] += rests < longestWaitS ? 1 : 0;
        restsUntil[region] = now + rests;
    }

    /** Returns another region immediately, or an earlier one after a pause if all were tried; null to give up. */
    Attempt afterSilence(List<Integer> tried, double now) {
        return next(tried, now, 0.1 * Math.pow(2, tried.size()));
    }

    /**
     * Returns the next try after a refusal; null to give up. Only refusals with {@code Retry-After} are retried: in the
     * same region later if the key has used its limit (429), else in another one immediately.
     */
    Attempt afterRefusal(List<Integer> tried, int region, int status, OptionalDouble retryAfterS, double now) {
        if (retryAfterS.isEmpty()) {
            return null;
        }
        double waitS = retryAfterS.getAsDouble();
        if (status == TOO_MANY_REQUESTS) {
            return withinBounds(tried, new Attempt(region, waitS));
        }
        synchronized (this) {
            restsUntil[region] = now + waitS;
        }
        return next(tried, now, waitS);
    }

    private Attempt next(Collection<Integer> tried, double now, double pauseS) {
        var order = order(now);
        var fresh = order.stream().filter(each -> !tried.contains(each)).findFirst();
        return withinBounds(tried, fresh.isPresent() ? new Attempt(fresh.get(), 0) : new Attempt(order.get(0), pauseS));
    }

    private Attempt withinBounds(Collection<Integer> tried, Attempt attempt) {
        return tried.size() < attempts && attempt.waitS() <= longestWaitS ? attempt : null;
    }
}
