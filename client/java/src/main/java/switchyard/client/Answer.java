package switchyard.client;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * A complete answer.
 *
 * @param json the body, as {@link Json} has it
 * @param headers by lower-case name; they name region and cell ({@code x-switchyard-region}, {@code …-cell})
 * @param attempts number of attempts that it took
 */
public record Answer(Map<String, Object> json, Map<String, String> headers, int attempts) {

    /** Returns the first choice's text, of chats, completions, responses and messages. */
    public String text() {
        if (Json.at(json, "choices", 0) instanceof Map<?, ?> choice) {
            var content = Json.text(choice, "message", "content");
            return content.isEmpty() ? Json.text(choice, "text") : content;
        }
        var out = new StringBuilder();
        for (var item : Json.list(json, "output")) {
            Json.list(item, "content").forEach(part -> out.append(Json.text(part, "text")));
        }
        Json.list(json, "content").forEach(part -> out.append(Json.text(part, "text")));
        return out.toString();
    }

    /** Returns the vectors of {@code /v1/embeddings}, in the order of the inputs. */
    public List<float[]> embeddings() {
        var rows = Json.list(json, "data");
        rows = new ArrayList<>(rows);
        rows.sort(Comparator.comparingLong(row -> Json.number(row, "index")));
        return rows.stream().map(row -> {
            var numbers = Json.list(row, "embedding");
            var vector = new float[numbers.size()];
            for (int index = 0; index < vector.length; index++) {
                vector[index] = numbers.get(index) instanceof Number number ? number.floatValue() : Float.NaN;
            }
            return vector;
        }).toList();
    }

    public Optional<Usage> usage() {
        return Usage.of(json);
    }

    /** Limits of the key, by {@code requests} and {@code tokens}. */
    public Map<String, Budget> budgets() {
        return Budget.allOf(headers);
    }

    public String region() {
        return headers.getOrDefault("x-switchyard-region", "");
    }
}
