package switchyard.client;

/** The body of {@code /v1/completions}. */
public final class Completion extends Body.Generating<Completion> {
    private Completion(String model) {
        super(model);
    }

    public static Completion of(String model, String... prompts) {
        return new Completion(model).with("prompt", prompts.length == 1 ? prompts[0] : prompts);
    }
}
