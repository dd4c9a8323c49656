package switchyard.client;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * The members of a request. {@link Chat}, {@link Completion}, {@link Embeddings} and {@link Rerank} have methods for
 * those of OpenAI's API; {@link #with} sets any other, such as {@code top_k}. Not for several threads.
 */
public class Body {
    private final Map<String, Object> members = new LinkedHashMap<>();

    /** Makes a body of these members. */
    public static Body of(Map<String, ?> members) {
        var body = new Body();
        members.forEach(body::with);
        return body;
    }

    /** Sets any member; null removes it. */
    public Body with(String name, Object value) {
        if (value == null) {
            members.remove(name);
        } else {
            members.put(name, value);
        }
        return this;
    }

    public final Map<String, Object> members() {
        return Collections.unmodifiableMap(members);
    }

    /** Returns the members as JSON. */
    public final String json() {
        return Json.write(members);
    }

    /** Members that all generating bodies share; each method returns the same object. */
    abstract static class Generating<B extends Generating<B>> extends Body {
        Generating(String model) {
            with("model", model);
        }

        @Override
        @SuppressWarnings("unchecked")
        public B with(String name, Object value) {
            super.with(name, value);
            return (B) this;
        }

        public B maxTokens(int tokens) {
            return with("max_tokens", tokens);
        }

        public B temperature(double temperature) {
            return with("temperature", temperature);
        }

        /** {@code flex} is served as batch work, {@code priority} as the most urgent class or not at all. */
        public B serviceTier(String tier) {
            return with("service_tier", tier);
        }

        public B topP(double probability) {
            return with("top_p", probability);
        }

        public B seed(long seed) {
            return with("seed", seed);
        }

        public B n(int choices) {
            return with("n", choices);
        }

        public B stop(String... texts) {
            return with("stop", texts);
        }

        public B presencePenalty(double penalty) {
            return with("presence_penalty", penalty);
        }

        public B frequencyPenalty(double penalty) {
            return with("frequency_penalty", penalty);
        }

        /** Streams end with an event that has {@link Event#usage()}. */
        public B includeUsage() {
            return with("stream_options", Map.of("include_usage", true));
        }
    }
}
