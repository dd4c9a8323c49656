package switchyard.client;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * JSON as plain Java: {@code Map<String, Object>}, {@code List<Object>}, {@code String}, {@code Long},
 * {@code BigInteger} above 64 bits, {@code Double}, {@code Boolean} and null. Strict as RFC 8259: no comments, NaN or
 * trailing commas, and no member twice. Nesting is bounded, so that no text overflows the stack.
 */
public final class Json {
    /** Maximum levels of objects and lists. */
    public static final int MAX_DEPTH = 256;
    private static final int MAX_DIGITS = 1000;
    private static final String HEX = "0123456789abcdef";

    /** A text that is no JSON, or a value that has no JSON. */
    public static final class Malformed extends IllegalArgumentException {
        private static final long serialVersionUID = 1L;

        Malformed(String why) {
            super(why);
        }
    }

    private final String text;
    private int at;

    private Json(String text) {
        this.text = text;
    }

    /**
     * Parses UTF-8.
     *
     * @throws Malformed with the position of the first wrong character
     */
    public static Object parse(byte[] utf8) {
        try {
            return parse(StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(utf8)).toString());
        } catch (CharacterCodingException error) {
            throw new Malformed("not UTF-8");
        }
    }

    /**
     * Parses one value.
     *
     * @throws Malformed with the position of the first wrong character
     */
    public static Object parse(String text) {
        var parser = new Json(text);
        var value = parser.value(0);
        parser.blanks();
        if (parser.at < text.length()) {
            throw parser.wrong("the end");
        }
        return value;
    }

    /** Returns the value at a path of member names and list positions; null where there is none. */
    public static Object at(Object value, Object... path) {
        for (var step : path) {
            if (step instanceof Integer index && value instanceof List<?> list) {
                value = index >= 0 && index < list.size() ? list.get(index) : null;
            } else {
                value = step instanceof String && value instanceof Map<?, ?> map ? map.get(step) : null;
            }
        }
        return value;
    }

    /** Returns the text at a path; empty if it is no text. */
    public static String text(Object value, Object... path) {
        return at(value, path) instanceof String found ? found : "";
    }

    /** Returns the list at a path; empty if it is no list. */
    public static List<Object> list(Object value, Object... path) {
        return at(value, path) instanceof List<?> found ? new ArrayList<>(found) : List.of();
    }

    /** Returns the whole number at a path; 0 if it is no number. */
    public static long number(Object value, Object... path) {
        return at(value, path) instanceof Number found ? found.longValue() : 0;
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> object(Object value) {
        return (Map<String, Object>) value;
    }

    /** Writes maps, iterables, arrays of objects, floats or doubles, texts, numbers, booleans and null. */
    public static String write(Object value) {
        var out = new StringBuilder();
        write(value, out, 0);
        return out.toString();
    }

    private static void write(Object value, StringBuilder out, int depth) {
        if (depth > MAX_DEPTH) {
            throw new Malformed("nested deeper than " + MAX_DEPTH + " levels");
        }
        if (value == null || value instanceof Boolean || value instanceof Long || value instanceof Integer
                || value instanceof Short || value instanceof BigInteger || value instanceof BigDecimal) {
            out.append(value);
        } else if (value instanceof Double || value instanceof Float) {
            if (!Double.isFinite(((Number) value).doubleValue())) {
                throw new Malformed(value + " has no JSON");
            }
            out.append(value);
        } else if (value instanceof CharSequence || value instanceof Enum<?>) {
            quote(value.toString(), out);
        } else if (value instanceof Map<?, ?> map) {
            char before = '{';
            for (var entry : map.entrySet()) {
                quote(String.valueOf(entry.getKey()), out.append(before));
                write(entry.getValue(), out.append(':'), depth + 1);
                before = ',';
            }
            out.append(before == '{' ? "{}" : "}");
        } else {
            char before = '[';
            for (var each : elements(value)) {
                write(each, out.append(before), depth + 1);
                before = ',';
            }
            out.append(before == '[' ? "[]" : "]");
        }
    }

    private static Iterable<?> elements(Object value) {
        if (value instanceof Iterable<?> many) {
            return many;
        }
        if (value != null && value.getClass().isArray()) {
            var found = new ArrayList<Object>();
            for (int index = 0; index < java.lang.reflect.Array.getLength(value); index++) {
                found.add(java.lang.reflect.Array.get(value, index));
            }
            return found;
        }
        throw new Malformed(value.getClass().getName() + " has no JSON");
    }

    private static void quote(String text, StringBuilder out) {
        out.append('"');
        for (int index = 0; index < text.length(); index++) {
            char each = text.charAt(index);
            if (each == '"' || each == '\\') {
                out.append('\\').append(each);
            } else if (each < ' ' || Character.isSurrogate(each) || each == '\u2028' || each == '\u2029') {
                out.append("\\u");
                for (int shift = 12; shift >= 0; shift -= 4) {
                    out.append(HEX.charAt(each >> shift & 15));
                }
            } else {
                out.append(each);
            }
        }
        out.append('"');
    }

    private Object value(int depth) {
        blanks();
        if (depth > MAX_DEPTH) {
            throw new Malformed("nested deeper than " + MAX_DEPTH + " levels at " + at);
        }
        return switch (peek()) {
            case '{' -> members(depth);
            case '[' -> items(depth);
            case '"' -> string();
            case 't' -> word("true", true);
            case 'f' -> word("false", false);
            case 'n' -> word("null", null);
            default -> number();
        };
    }

    private Map<String, Object> members(int depth) {
        var found = new LinkedHashMap<String, Object>();
        at++;
        blanks();
        if (skip('}')) {
            return found;
        }
        do {
            blanks();
            int begin = at;
            if (peek() != '"') {
                throw wrong("a member's name");
            }
            var name = string();
            blanks();
            expect(':');
            if (found.containsKey(name)) {
                throw new Malformed("a member twice at " + begin);
            }
            found.put(name, value(depth + 1));
            blanks();
        } while (skip(','));
        expect('}');
        return found;
    }

    private List<Object> items(int depth) {
        var found = new ArrayList<Object>();
        at++;
        blanks();
        if (skip(']')) {
            return found;
        }
        do {
            found.add(value(depth + 1));
            blanks();
        } while (skip(','));
        expect(']');
        return found;
    }

    private String string() {
        int begin = ++at;
        StringBuilder out = null;
        while (true) {
            char each = peek();
            if (each < ' ' || at >= text.length()) {
                throw wrong("the end of a text");
            }
            if (each == '"') {
                var tail = text.substring(begin, at++);
                return out == null ? tail : out.append(tail).toString();
            }
            if (each == '\\') {
                out = (out == null ? new StringBuilder() : out).append(text, begin, at++);
                out.append(escaped());
                begin = at;
            } else {
                at++;
            }
        }
    }

    private char escaped() {
        char kind = peek();
        at++;
        return switch (kind) {
            case '"', '\\', '/' -> kind;
            case 'b' -> '\b';
            case 'f' -> '\f';
            case 'n' -> '\n';
            case 'r' -> '\r';
            case 't' -> '\t';
            case 'u' -> {
                int code = 0;
                for (int digit = 0; digit < 4; digit++, at++) {
                    int found = peek() < 128 ? Character.digit(peek(), 16) : -1;
                    if (found < 0) {
                        throw wrong("four hexadecimal digits");
                    }
                    code = code * 16 + found;
                }
                yield (char) code;
            }
            default -> {
                at--;
                throw wrong("an escape");
            }
        };
    }

    private Object number() {
        int begin = at;
        boolean isWhole = true;
        skip('-');
        if (!skip('0')) {
            digits();
        }
        if (skip('.')) {
            isWhole = false;
            digits();
        }
        if (skip('e') || skip('E')) {
            isWhole = false;
            if (!skip('+')) {
                skip('-');
            }
            digits();
        }
        if (at - begin > MAX_DIGITS) {
            throw new Malformed("a number of more than " + MAX_DIGITS + " digits at " + begin);
        }
        var found = text.substring(begin, at);
        if (!isWhole) {
            return Double.valueOf(found);
        }
        var whole = new BigInteger(found);
        return whole.bitLength() < Long.SIZE ? (Object) whole.longValue() : whole;
    }

    private void digits() {
        int begin = at;
        while (peek() >= '0' && peek() <= '9') {
            at++;
        }
        if (at == begin) {
            throw wrong("a value");
        }
    }

    private Object word(String word, Object value) {
        if (!text.startsWith(word, at)) {
            throw wrong("a value");
        }
        at += word.length();
        return value;
    }

    private void blanks() {
        while (at < text.length() && " \t\n\r".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
    }

    private char peek() {
        return at < text.length() ? text.charAt(at) : '\0';
    }

    private boolean skip(char one) {
        boolean isThere = at < text.length() && text.charAt(at) == one;
        at += isThere ? 1 : 0;
        return isThere;
    }

    private void expect(char one) {
        if (!skip(one)) {
            throw wrong("'" + one + "'");
        }
    }

    private Malformed wrong(String expected) {
        return new Malformed("no JSON: " + expected + " expected at " + at);
    }
}
