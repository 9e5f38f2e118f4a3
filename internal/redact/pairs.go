package redact

import "strings"

// In the text of an argument, such as the script of sh -c or a JSON object, a
// secret follows its name.
var (
	name = pattern(`-{0,2}[A-Za-z_][A-Za-z0-9_.-]*`)
	// assigned is = or : and a value, which may be quoted. The name before it may
	// end in a quote or bracket, and a scheme may precede the value.
	assigned = pattern(`^["']?\]?\s*[=:]\s*(?i:(?:bearer|basic|digest|token)\s+)?("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',;&|)}\]=][^\s"',;&|)}\]]*)`)
	// given is the value of an option.
	given = pattern(`^\s+("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'-][^\s"';&|)]*)`)
)

// text redacts the values after secret names in a text, and the secrets that
// [Text] knows.
func (n Names) text(text string) string {
	var out strings.Builder
	done := 0 // how much of text is in out
	for _, at := range name().FindAllStringIndex(text, -1) {
		if at[0] < done {
			continue // within a value
		}
		word := text[at[0]:at[1]]
		r := n.rank(word)
		if r == never {
			continue
		}
		isOption := strings.HasPrefix(word, "-")
		m := assigned().FindStringSubmatchIndex(text[at[1]:])
		if m == nil && isOption {
			m = given().FindStringSubmatchIndex(text[at[1]:])
		}
		if m == nil {
			continue
		}
		begin, end := at[1]+m[2], at[1]+m[3]
		value, quote := text[begin:end], ""
		if value[0] == '"' || value[0] == '\'' {
			quote, value = value[:1], value[1:len(value)-1]
		}
		switch {
		case !r.hides(value):
		case quote == "" && strings.ContainsAny(value, "([{") && value != Mark: // an expression
		case !isOption && r == mostly && len(words(word)) == 1 && !certain(text[:at[0]], word, quote):
		default:
			out.WriteString(text[done:begin] + quote + Mark + quote)
			done = end
		}
	}
	out.WriteString(text[done:])
	return Text(out.String())
}

// certain reports whether a lone key, token or auth in a text has a secret: as an
// environment variable, in the query of a URL, or with a quoted value. Otherwise
// it is more likely an argument in a program.
func certain(before, word, quote string) bool {
	switch {
	case word == strings.ToUpper(word), strings.HasSuffix(before, "?"), strings.HasSuffix(before, "&"):
		return true
	}
	return quote != "" && word != "key"
}
