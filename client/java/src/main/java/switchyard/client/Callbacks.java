package switchyard.client;

import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.time.Duration;
import java.time.Instant;
import java.util.HexFormat;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import java.util.regex.Pattern;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;

/** Verifies callbacks of near-real-time requests. */
public final class Callbacks {
    /** Maximum age of a callback, against replays. */
    public static final Duration TOLERANCE = Duration.ofMinutes(5);
    private static final Pattern STAMP = Pattern.compile("[0-9]{1,15}");

    private Callbacks() {}

    /** As {@link #verify(byte[], Map, String, Instant)}, now. */
    public static Pending verify(byte[] body, Map<String, String> headers, String secret) {
        return verify(body, headers, secret, Instant.now());
    }

    /**
     * Returns the ended request of a callback; {@code retrieve} has its answer.
     *
     * @param body the raw body
     * @param secret the one of {@code submit}
     * @throws BadCallbackException not from the fleet, or too old
     */
    public static Pending verify(byte[] body, Map<String, String> headers, String secret, Instant now) {
        var named = new TreeMap<String, String>();
        headers.forEach((name, value) -> named.put(name.toLowerCase(Locale.ROOT), value));
        var stamp = named.getOrDefault("x-switchyard-timestamp", "");
        if (!STAMP.matcher(stamp).matches()) {
            throw new BadCallbackException("X-Switchyard-Timestamp is missing or not a whole number of seconds", null);
        }
        var right = "sha256=" + HexFormat.of().formatHex(signature(secret, stamp, body));
        var given = named.getOrDefault("x-switchyard-signature", "");
        if (!MessageDigest.isEqual(utf8(right), utf8(given))) {
            throw new BadCallbackException(
                    "X-Switchyard-Signature does not match the body, the time and this secret", null);
        }
        long ageS = now.getEpochSecond() - Long.parseLong(stamp);
        if (Math.abs(ageS) > TOLERANCE.toSeconds()) {
            throw new BadCallbackException("it was signed " + ageS + " s ago; at most " + TOLERANCE.toSeconds()
                    + " s are accepted", null);
        }
        try {
            if (Json.at(Json.parse(body), "data") instanceof Map<?, ?> data) {
                return Pending.of(Json.object(data));
            }
        } catch (Json.Malformed error) {
            throw new BadCallbackException("the body is no JSON", error);
        }
        throw new BadCallbackException("the body has no data", null);
    }

    private static byte[] signature(String secret, String stamp, byte[] body) {
        try {
            var mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(utf8(secret), "HmacSHA256"));
            mac.update(utf8(stamp + "."));
            return mac.doFinal(body);
        } catch (GeneralSecurityException | IllegalArgumentException error) {
            throw new BadCallbackException("the secret cannot be used: " + error.getMessage(), error);
        }
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
