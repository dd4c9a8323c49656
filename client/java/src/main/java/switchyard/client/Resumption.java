package switchyard.client;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

/**
 * Follows one stream and its repeats, to cut what the application has from the same answer by another ingress. Only a
 * stream whose events are the text of one answer can be repeated: other events, such as those of a tool call, may be
 * divided differently. Pure.
 */
final class Resumption {
    private static final Set<String> PLAIN_TYPES = Set.of(
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed", "response.incomplete",
            "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop", "ping");
    private static final Set<String> PLAIN_PARTS = Set.of("text", "text_delta", "message", "output_text");
    private static final Set<String> PLAIN_MEMBERS = Set.of("role", "content");
    private static final List<String> PARTS = List.of("delta", "content_block", "item", "part");

    private final StringBuilder text = new StringBuilder();
    private boolean isPlain = true;
    /** Events without text since the last text. */
    private int after;
    /** Characters that the repeat still has to give before its events are new. */
    private int ahead;
    /** Events without text that the repeat still has to give after those. */
    private int dropped;

    boolean canRepeat() {
        return isPlain;
    }

    /** The next event is the first one of a repeat. */
    void repeat() {
        ahead = text.length();
        dropped = after;
    }

    /**
     * Returns the new part of an event; empty if the application has all of it.
     *
     * @throws BrokenOffException the repeat is another answer
     */
    Optional<Event> fresh(Event event) {
        isPlain = isPlain && isPlain(event.json());
        var given = event.text();
        if (ahead > 0) {
            return cut(event, given);
        }
        if (dropped > 0 && given.isEmpty()) {
            dropped--;
            return Optional.empty();
        }
        dropped = 0;
        note(given);
        return Optional.of(event);
    }

    private Optional<Event> cut(Event event, String given) {
        int at = text.length() - ahead;
        int shown = Math.min(given.length(), ahead);
        if (!text.substring(at, at + shown).equals(given.substring(0, shown))) {
            isPlain = false;
            throw new BrokenOffException("the stream broke off, and its repeat is another answer", null);
        }
        ahead -= shown;
        var fresh = given.substring(shown);
        if (fresh.isEmpty()) {
            return Optional.empty();
        }
        dropped = 0;
        note(fresh);
        return Optional.of(new Event(event.name(), withText(event.json(), fresh)));
    }

    private void note(String given) {
        text.append(given);
        after = given.isEmpty() ? after + 1 : 0;
    }

    private static boolean isPlain(Map<String, Object> body) {
        if (body.get("type") != null) {
            return PLAIN_TYPES.contains(Json.text(body, "type")) && PARTS.stream().map(body::get)
                    .allMatch(part -> !(part instanceof Map<?, ?> members) || !members.containsKey("type")
                            || PLAIN_PARTS.contains(Json.text(part, "type")));
        }
        return Json.list(body, "choices").stream().allMatch(choice ->
                Json.number(choice, "index") == 0 && isNothing(Json.at(choice, "logprobs"))
                        && hasPlainMembers(Json.at(choice, "delta")));
    }

    private static boolean hasPlainMembers(Object delta) {
        return !(delta instanceof Map<?, ?> members) || members.entrySet().stream().allMatch(member ->
                isNothing(member.getValue()) || PLAIN_MEMBERS.contains(String.valueOf(member.getKey())));
    }

    private static boolean isNothing(Object value) {
        return value == null || value.equals("") || value.equals(false) || value.equals(List.of())
                || value.equals(Map.of());
    }

    /** Returns the event with another text, in the member from which {@link Event#text} reads it. */
    private static Map<String, Object> withText(Map<String, Object> body, String text) {
        if (Json.at(body, "choices", 0) instanceof Map<?, ?> choice) {
            var changed = choice.get("delta") instanceof Map<?, ?> delta
                    ? with(choice, "delta", with(delta, "content", text)) : with(choice, "text", text);
            return with(body, "choices", List.of(changed));
        }
        return body.get("delta") instanceof Map<?, ?> delta
                ? with(body, "delta", with(delta, "text", text)) : with(body, "delta", text);
    }

    private static Map<String, Object> with(Map<?, ?> members, String name, Object value) {
        var changed = new LinkedHashMap<>(Json.object(members));
        changed.put(name, value);
        return changed;
    }
}
