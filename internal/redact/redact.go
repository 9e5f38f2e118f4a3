// Package redact removes secrets from command lines, configurations and messages
// before they are recorded. A log keeps its events forever, and every user with
// access to the store can read them.
//
//	--api-key VALUE, --api-key=VALUE, API_KEY=VALUE   by name
//	--set=wandb.api_key=VALUE, {"wandb": {"api_key": …}}
//	sh -c 'API_KEY=VALUE python3 train.py --token VALUE'
//	https://user:VALUE@host, Authorization: Bearer VALUE   by shape
//	sk-…, ghp_…, hf_…, AKIA…, eyJ….….…, private keys in PEM
//
// The last word of a name decides: api_key and hfToken are secret; --max-tokens,
// --key-padding, token_file and monkey are not. The key or token of something
// else, as in --chosen_key chosen, is secret only if its value looks generated.
// References to the environment such as $API_KEY stay: they are not secrets, and
// a job that uses them can be launched again. [Mark] replaces a secret value. The
// functions are pure and idempotent, and do not modify their arguments.
package redact

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Mark replaces a redacted value.
const Mark = "[redacted]"

// Names decides which names have secret values. The zero value knows the usual
// names.
type Names struct {
	more [][]string // words of other names
}

// More returns Names that also knows the given names of options, variables or
// configuration keys. A name is matched by its words, as the end of a longer
// name, in any spelling: "pin" matches --pin, card_pin and CARD_PIN.
func More(names ...string) (Names, error) {
	var n Names
	for _, name := range names {
		w := words(name)
		if len(w) == 0 {
			return Names{}, fmt.Errorf("redact %q: it has no word; give the name of an option, a variable or a key, such as pin", name)
		}
		n.more = append(n.more, w)
	}
	return n, nil
}

// pattern returns a function that compiles an expression at its first call: most processes
// redact nothing.
func pattern(expression string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })
}

// assignment is an argument of the form NAME=VALUE.
var assignment = pattern(`(?s)^([-+~]{0,2}[A-Za-z_][A-Za-z0-9_.-]*)=(.*)$`)

// option is an argument whose value is the next argument.
var option = pattern(`^--?[A-Za-z_][A-Za-z0-9_.-]*$`)

// Args returns the arguments of a command with secrets redacted.
func (n Names) Args(args []string) []string {
	out := slices.Clone(args)
	for i := range out {
		if i > 0 && option().MatchString(args[i-1]) && !isOption(args[i]) && n.hides(args[i-1], args[i]) {
			out[i] = Mark
			continue
		}
		out[i] = n.arg(args[i])
	}
	return out
}

// isOption reports whether an argument is more likely an option than the value of
// the preceding argument.
func isOption(arg string) bool {
	return strings.HasPrefix(arg, "--") || strings.HasPrefix(arg, "-") && len(arg) <= 3
}

// arg redacts one argument. The value of a name may itself be an assignment, as
// in --set=api_key=VALUE.
func (n Names) arg(arg string) string {
	m := assignment().FindStringSubmatch(arg)
	switch {
	case m == nil:
		return n.text(arg)
	case n.hides(m[1], m[2]):
		return m[1] + "=" + Mark
	}
	return m[1] + "=" + n.arg(m[2])
}

// Marked returns the redacted arguments: an option whose value was redacted, or
// the whole argument.
func Marked(args []string) []string {
	var out []string
	for i, arg := range args {
		switch {
		case !strings.Contains(arg, Mark):
		case arg == Mark && i > 0:
			out = append(out, args[i-1])
		default:
			name, _, _ := strings.Cut(arg, "="+Mark)
			out = append(out, name)
		}
	}
	return out
}

// Config returns a configuration with secrets redacted. Below a name such as
// credentials it redacts everything. Below a name such as auth it redacts strings
// and lists, and descends into objects.
func (n Names) Config(config map[string]any) map[string]any {
	if config == nil {
		return nil
	}
	out := make(map[string]any, len(config))
	for name, value := range config {
		out[name] = n.value(value, n.rank(name))
	}
	return out
}

// value redacts a value whose name has a rank.
func (n Names) value(value any, r rank) any {
	switch v := value.(type) {
	case nil, bool:
		return v
	case map[string]any:
		if r == always {
			return Mark
		}
		return n.Config(v)
	case []any:
		if r == always {
			return Mark
		}
		out := make([]any, len(v))
		for i := range v {
			out[i] = n.value(v[i], r)
		}
		return out
	case string:
		if r.hides(v) {
			return Mark
		}
		return n.text(v)
	case float64:
		if r.hides(strconv.FormatFloat(v, 'f', -1, 64)) {
			return Mark
		}
		return v
	}
	if r == always {
		return Mark
	}
	return value
}
