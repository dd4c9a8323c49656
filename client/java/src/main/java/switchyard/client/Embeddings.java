package switchyard.client;

import java.util.List;

/** The body of {@code /v1/embeddings}. */
public final class Embeddings extends Body {
    private Embeddings() {}

    public static Embeddings of(String model, String... inputs) {
        return of(model, List.of(inputs));
    }

    public static Embeddings of(String model, List<String> inputs) {
        return new Embeddings().with("model", model).with("input", inputs);
    }

    @Override
    public Embeddings with(String name, Object value) {
        super.with(name, value);
        return this;
    }

    public Embeddings dimensions(int dimensions) {
        return with("dimensions", dimensions);
    }
}
