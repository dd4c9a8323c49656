package switchyard.client;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalDouble;
import java.util.Random;
import java.util.concurrent.Callable;

/** Checks of single classes, without a server. Each returns what it found; Python has the expected values. */
final class Units {
    private Units() {}

    static Map<String, Object> all() {
        var found = new LinkedHashMap<String, Object>();
        Map<String, Callable<Object>> checks = Map.of(
                "json_values", Units::jsonValues,
                "json_refused", Units::jsonRefused,
                "json_round_trip", Units::jsonRoundTrip,
                "events", Units::events,
                "resumption", Units::resumption,
                "failover", Units::failover,
                "callbacks", Units::callbacks,
                "bodies", Units::bodies);
        checks.forEach((name, check) -> {
            try {
                found.put(name, check.call());
            } catch (Exception error) {
                found.put(name, error.toString());
            }
        });
        return found;
    }

    /** Streams that break somewhere, and repeats that divide the same text otherwise: how many give another text. */
    private static Object resumption() {
        var random = new Random(1);
        int differ = 0;
        for (int round = 0; round < 300; round++) {
            var text = "t".repeat(random.nextInt(5)) + "é🚂 two three".repeat(random.nextInt(3));
            var seen = new Resumption();
            var shown = new StringBuilder();
            var first = divided(text, random);
            for (var event : first.subList(0, random.nextInt(first.size() + 1))) {
                seen.fresh(event).ifPresent(fresh -> shown.append(fresh.text()));
            }
            seen.repeat();
            for (var event : divided(text, random)) {
                seen.fresh(event).ifPresent(fresh -> shown.append(fresh.text()));
            }
            differ += shown.toString().equals(text) && seen.canRepeat() ? 0 : 1;
        }
        return differ;
    }

    private static List<Event> divided(String text, Random random) {
        var events = new ArrayList<Event>();
        for (int at = 0; at < text.length();) {
            int end = text.offsetByCodePoints(at, random.nextInt(text.codePointCount(at, text.length()) + 1));
            var delta = Map.<String, Object>of("role", "assistant", "content", text.substring(at, end));
            events.add(new Event("", Map.of("choices", List.of(Map.of("index", 0L, "delta", delta)))));
            at = end;
        }
        return events;
    }

    private static Object jsonValues() {
        var text = " {\"a\":[1,-2.5e3,true,false,null,\"\\u00e9\\n\\ud83d\\ude82\"],"
                + "\"big\":123456789012345678901234567890,\"empty\":{},\"none\":[]} ";
        return Json.parse(text.getBytes(StandardCharsets.UTF_8));
    }

    private static Object jsonRefused() {
        var accepted = new ArrayList<String>();
        var wrong = new String[] {
            "", "{", "[1,]", "{\"a\":1,}", "{\"a\":1,\"a\":2}", "NaN", "Infinity", "01", "1.", ".5", "+1", "1e", "'a'",
            "\"a", "\"\\x\"", "\"\\u12g4\"", "\"a\nb\"", "tru", "1 2", "{a:1}", "[1 2]", "/**/1", "\u00a01",
            "[".repeat(Json.MAX_DEPTH + 2) + "]".repeat(Json.MAX_DEPTH + 2), "[".repeat(1_000_000),
            "9".repeat(2000)};
        for (var text : wrong) {
            try {
                Json.parse(text);
                accepted.add(text.substring(0, Math.min(20, text.length())));
            } catch (Json.Malformed expected) {
                continue;
            }
        }
        try {
            Json.parse(new byte[] {'"', (byte) 0xff, '"'});
            accepted.add("not UTF-8");
        } catch (Json.Malformed expected) {
            return accepted;
        }
        return accepted;
    }

    private static Object jsonRoundTrip() {
        var random = new Random(1);
        int differ = 0;
        for (int round = 0; round < 300; round++) {
            var value = value(random, 0);
            differ += value == null || value.equals(Json.parse(Json.write(value))) ? 0 : 1;
        }
        return differ;
    }

    private static Object value(Random random, int depth) {
        switch (random.nextInt(depth < 4 ? 7 : 5)) {
            case 0: return random.nextLong();
            case 1: return random.nextGaussian() * Math.pow(10, random.nextInt(40) - 20);
            case 2: return random.nextBoolean();
            case 3: return null;
            case 4: return random.ints(random.nextInt(8), 0, 0xd800).collect(
                    StringBuilder::new, StringBuilder::appendCodePoint, StringBuilder::append).toString();
            case 5:
                var list = new ArrayList<Object>();
                for (int count = random.nextInt(4); count > 0; count--) {
                    list.add(value(random, depth + 1));
                }
                return list;
            default:
                var map = new HashMap<String, Object>();
                for (int count = random.nextInt(4); count > 0; count--) {
                    map.put("k" + random.nextInt(), value(random, depth + 1));
                }
                return map;
        }
    }

    /** The same events, however their bytes are cut and their lines end. */
    private static Object events() {
        var random = new Random(2);
        int differ = 0;
        for (int round = 0; round < 200; round++) {
            var end = List.of("\n", "\r\n", "\r").get(round % 3);
            var wire = (": a comment" + end + "data: {\"é\":" + end + "data:1}" + end + end + "retry: 5" + end + end
                    + "event: last " + end + "id: 7" + end + "data:  two" + end + end).getBytes(StandardCharsets.UTF_8);
            var parser = new SseParser();
            var found = new ArrayList<String>();
            for (int begin = 0; begin < wire.length;) {
                int size = Math.min(wire.length - begin, 1 + random.nextInt(9));
                parser.feed(ByteBuffer.wrap(wire, begin, size)).forEach(raw ->
                        found.add(raw.name() + "|" + new String(raw.data(), StandardCharsets.UTF_8)));
                begin += size;
            }
            differ += found.equals(List.of("|{\"é\":\n1}", "last| two")) ? 0 : 1;
        }
        return differ;
    }

    private static Object failover() {
        var retries = new Retries(4, Duration.ofSeconds(10), Duration.ofSeconds(5));
        var three = new Failover(3, retries);
        three.failed(0, 100);
        var two = new Failover(2, retries);
        var rests = new ArrayList<Object>();
        for (double[] each : new double[][] {{0, 5}, {10, 20}, {30, 40}}) {
            two.failed(0, each[0]);
            rests.add(two.order(each[1] - 0.1));
            rests.add(two.order(each[1]));
        }
        var decided = new ArrayList<Object>();
        for (double[] each : new double[][] {{503, 2}, {503, -1}, {429, 2}, {429, 60}, {400, -1}}) {
            var after = each[1] < 0 ? OptionalDouble.empty() : OptionalDouble.of(each[1]);
            var next = new Failover(2, retries).afterRefusal(List.of(0), 0, (int) each[0], after, 0);
            decided.add(next == null ? null : List.of(next.region(), next.waitS()));
        }
        return Map.of("order", List.of(three.order(104.9), three.order(105)), "rests", rests, "decided", decided);
    }

    private static Object callbacks() {
        var body = "{\"data\":{\"id\":\"ar_1\",\"status\":\"done\"}}".getBytes(StandardCharsets.UTF_8);
        var now = Instant.ofEpochSecond(1_800_000_000L);
        // sha256 of the fleet's own signature for this body, time and secret: see tests/client/test_java.py
        var signature = System.getProperty("callback.signature");
        var headers = Map.of("X-Switchyard-Timestamp", "1800000000", "X-Switchyard-Signature", signature);
        var found = new ArrayList<Object>();
        found.add(Callbacks.verify(body, headers, "whs", now.plusSeconds(299)).id());
        List<Callable<Pending>> wrong = List.of(
                () -> Callbacks.verify("{}".getBytes(StandardCharsets.UTF_8), headers, "whs", now),
                () -> Callbacks.verify(body, headers, "other", now),
                () -> Callbacks.verify(body, headers, "", now),
                () -> Callbacks.verify(body, headers, "whs", now.plusSeconds(301)),
                () -> Callbacks.verify(body, headers, "whs", now.minusSeconds(301)),
                () -> Callbacks.verify(body, Map.of(), "whs", now),
                () -> Callbacks.verify(body, Map.of("x-switchyard-timestamp", "1e9"), "whs", now),
                () -> Callbacks.verify(body, Map.of("x-switchyard-timestamp", "1800000000"), "whs", now));
        for (var each : wrong) {
            try {
                found.add(each.call().id());
            } catch (BadCallbackException error) {
                found.add("refused");
            } catch (Exception error) {
                found.add(error.toString());
            }
        }
        return found;
    }

    private static Object bodies() {
        return List.of(
                Chat.of("m").system("s").user("u").maxTokens(3).temperature(0.5).stop("a", "b").seed(1)
                        .serviceTier("flex").includeUsage().tool("f", "does", Map.of("type", "object")).with("top_k", 4).with("seed", null).members(),
                Completion.of("m", "p").n(2).members(),
                Embeddings.of("m", "x").dimensions(8).members(),
                Rerank.of("m", "q", List.of("d")).topN(1).members());
    }
}
