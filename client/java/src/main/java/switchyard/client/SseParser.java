package switchyard.client;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** Server-sent events from bytes, whose lines end with CR, LF or both. Each byte is read once, however cut. */
final class SseParser {
    static final int MAX_EVENT_BYTES = 16 * 1024 * 1024;

    /** One event: its name, empty without a line {@code event}, and its data. */
    record Raw(String name, byte[] data) {}

    private final ByteArrayOutputStream line = new ByteArrayOutputStream();
    private ByteArrayOutputStream data;
    private String name = "";
    private int size;
    private boolean afterReturn;

    /**
     * Returns the events that these bytes complete.
     *
     * @throws BrokenOffException an event is too long
     */
    List<Raw> feed(ByteBuffer piece) {
        var found = new ArrayList<Raw>();
        while (piece.hasRemaining()) {
            byte each = piece.get();
            if (each == '\n' && afterReturn) {
                afterReturn = false;
                continue;
            }
            afterReturn = each == '\r';
            if (each == '\n' || each == '\r') {
                endLine(found);
            } else {
                line.write(each);
            }
            if (++size > MAX_EVENT_BYTES) {
                throw new BrokenOffException("an event is longer than " + MAX_EVENT_BYTES + " bytes", null);
            }
        }
        return found;
    }

    private void endLine(List<Raw> found) {
        if (line.size() == 0) {
            if (data != null && data.size() > 0) {
                found.add(new Raw(name, data.toByteArray()));
            }
            data = null;
            name = "";
            size = 0;
            return;
        }
        var bytes = line.toByteArray();
        line.reset();
        if (startsWith(bytes, "data")) {
            if (data == null) {
                data = new ByteArrayOutputStream();
            } else {
                data.write('\n');
            }
            int begin = valueOf(bytes, "data");
            data.write(bytes, begin, bytes.length - begin);
        } else if (startsWith(bytes, "event")) {
            int begin = valueOf(bytes, "event");
            name = new String(bytes, begin, bytes.length - begin, StandardCharsets.UTF_8).strip();
        }
    }

    private static boolean startsWith(byte[] line, String field) {
        if (line.length < field.length() || line.length > field.length() && line[field.length()] != ':') {
            return false;
        }
        for (int index = 0; index < field.length(); index++) {
            if (line[index] != field.charAt(index)) {
                return false;
            }
        }
        return true;
    }

    private static int valueOf(byte[] line, String field) {
        int begin = Math.min(line.length, field.length() + 1);
        return begin < line.length && line[begin] == ' ' ? begin + 1 : begin;
    }
}
