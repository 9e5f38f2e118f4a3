package tune

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
)

// Space is the set of configurations that trials are drawn from: a value or a domain for
// each name.
type Space struct {
	values map[string]any // as given
	names  []string       // in the order in which they are drawn
	of     map[string]domain
}

// domain is what one name may have. Of a grid, each trial has the next value; of all others,
// each trial has a random one.
type domain struct {
	kind   string // "", a single value; or a key of kinds
	values []any  // of a choice or a grid, or the single one
	lo, hi float64
}

// Kinds of domains.
const (
	choice     = "choice"
	grid       = "grid"
	uniform    = "uniform"
	logUniform = "loguniform"
	integer    = "integer"
)

// domains describes them in errors.
const domains = `{"choice": [...]}, {"grid": [...]}, {"uniform": [LOW, HIGH]}, {"loguniform": [LOW, HIGH]} or {"integer": [LOW, HIGH]}`

// ReadSpace parses the JSON text of a space: an object with a value or a domain for each
// name. The error is an [ErrDefinition].
func ReadSpace(text []byte) (Space, error) {
	var values map[string]any
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&values); err != nil {
		return Space{}, fmt.Errorf("%w: the search space is no JSON object: %w", ErrDefinition, err)
	}
	if d.More() {
		return Space{}, fmt.Errorf("%w: the search space has more than one JSON object", ErrDefinition)
	}
	s, err := parseSpace(values)
	if err != nil {
		return s, fmt.Errorf("%w: %w", ErrDefinition, err)
	}
	return s, nil
}

func parseSpace(values map[string]any) (Space, error) {
	s := Space{values: values, names: slices.Sorted(maps.Keys(values)), of: map[string]domain{}}
	if len(values) == 0 {
		return s, fmt.Errorf("the search space is empty: name what differs between trials")
	}
	for _, name := range s.names {
		if name == "" || strings.ContainsAny(name, "{}") {
			return s, fmt.Errorf("%q: a name is not empty and has no braces", name)
		}
		d, err := parseDomain(values[name])
		if err != nil {
			return s, fmt.Errorf("%q: %w", name, err)
		}
		s.of[name] = d
	}
	return s, nil
}

func parseDomain(value any) (domain, error) {
	object, ok := value.(map[string]any)
	if !ok {
		return domain{values: []any{value}}, nil
	}
	if len(object) != 1 {
		return domain{}, fmt.Errorf("want a value, or one of %s", domains)
	}
	for kind, of := range object {
		list, ok := of.([]any)
		if !ok || len(list) == 0 {
			return domain{}, fmt.Errorf("%s: want a list that is not empty, as in %s", kind, domains)
		}
		switch kind {
		case choice, grid:
			return domain{kind: kind, values: list}, nil
		case uniform, logUniform, integer:
			return bounds(kind, list)
		}
		return domain{}, fmt.Errorf("%s: want one of %s", kind, domains)
	}
	return domain{}, nil
}

func bounds(kind string, list []any) (domain, error) {
	if len(list) != 2 {
		return domain{}, fmt.Errorf("%s: want [LOW, HIGH]", kind)
	}
	d := domain{kind: kind}
	for i, to := range []*float64{&d.lo, &d.hi} {
		v, ok := list[i].(float64)
		if !ok {
			return d, fmt.Errorf("%s: %v is no number", kind, list[i])
		}
		*to = v
	}
	const whole = 1 << 53 // integers of a float64
	switch {
	case d.lo > d.hi:
		return d, fmt.Errorf("%s: %v is above %v", kind, d.lo, d.hi)
	case math.IsInf(d.hi-d.lo, 0):
		return d, fmt.Errorf("%s: %v to %v is too wide: the difference is no finite number", kind, d.lo, d.hi)
	case kind == logUniform && d.lo <= 0:
		return d, fmt.Errorf("%s: %v is not above 0", kind, d.lo)
	case kind == integer && (d.lo != math.Trunc(d.lo) || d.hi != math.Trunc(d.hi) || math.Abs(d.lo) > whole || math.Abs(d.hi) > whole):
		return d, fmt.Errorf("%s: want whole numbers", kind)
	}
	return d, nil
}

// Values returns the space as it was given.
func (s Space) Values() map[string]any { return s.values }

// Names returns the names in order.
func (s Space) Names() []string { return s.names }

// Cells returns the number of combinations of the grids; 1 without a grid.
func (s Space) Cells() int {
	n := 1
	for _, d := range s.of {
		if d.kind == grid && n <= mostTrials {
			n *= len(d.values)
		}
	}
	return n
}

// Draw returns the configuration of a trial. Trials go through the combinations of the
// grids in order, the last name first, again and again; all else is drawn at random, with a
// generator of its own for each trial.
func (s Space) Draw(seed int64, trial int) map[string]any {
	random := rand.New(rand.NewPCG(uint64(seed), uint64(trial)))
	config, cell := map[string]any{}, trial
	for _, name := range slices.Backward(s.names) {
		d := s.of[name]
		if d.kind == grid {
			config[name] = d.values[cell%len(d.values)]
			cell /= len(d.values)
			continue
		}
		config[name] = d.draw(random)
	}
	return config
}

func (d domain) draw(random *rand.Rand) any {
	switch d.kind {
	case choice:
		return d.values[random.IntN(len(d.values))]
	case uniform:
		return d.lo + (d.hi-d.lo)*random.Float64()
	case logUniform:
		v := math.Exp(math.Log(d.lo) + (math.Log(d.hi)-math.Log(d.lo))*random.Float64())
		return min(max(v, d.lo), d.hi)
	case integer:
		return d.lo + float64(random.Int64N(int64(d.hi-d.lo)+1))
	}
	return d.values[0]
}

// Fill returns a command for a trial: each {NAME} in its arguments is replaced by the
// trial's value of that name.
func (s Space) Fill(command []string, config map[string]any) []string {
	pairs := make([]string, 0, 2*len(s.names))
	for _, name := range s.names {
		pairs = append(pairs, "{"+name+"}", Text(config[name]))
	}
	r := strings.NewReplacer(pairs...)
	out := make([]string, len(command))
	for i, arg := range command {
		out[i] = r.Replace(arg)
	}
	return out
}

// word is a placeholder of [Space.Fill] that is a whole argument, or the whole value of an
// option.
var word = regexp.MustCompile(`^(?:--?[\w.-]+=)?\{([A-Za-z_][\w.-]*)\}$`)

// Check returns an error if an argument of a command is a placeholder for a name that the space
// does not have. It accepts other braces: programs have uses of their own for them. The error is
// an [ErrDefinition].
func (s Space) Check(command []string) error {
	for _, arg := range command {
		m := word.FindStringSubmatch(arg)
		if m != nil && !slices.Contains(s.names, m[1]) {
			return fmt.Errorf("%w: argument %s: the search space has no %q, only %s", ErrDefinition, arg, m[1], strings.Join(s.names, ", "))
		}
	}
	return nil
}

// Text returns a value of a configuration as an argument: a string as it is, all else as
// JSON.
func Text(value any) string {
	if text, ok := value.(string); ok {
		return text
	}
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(text)
}
