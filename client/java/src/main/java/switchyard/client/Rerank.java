package switchyard.client;

import java.util.List;

/** The body of {@code /v1/rerank}, {@code /v2/rerank} and {@code /rerank}. */
public final class Rerank extends Body {
    private Rerank() {}

    public static Rerank of(String model, String query, List<String> documents) {
        return new Rerank().with("model", model).with("query", query).with("documents", documents);
    }

    @Override
    public Rerank with(String name, Object value) {
        super.with(name, value);
        return this;
    }

    public Rerank topN(int documents) {
        return with("top_n", documents);
    }
}
