package tune

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
)

// Exploration is how the configuration of a clone differs from its donor's.
type Exploration struct {
	Resample float64   // probability that a value is drawn again from its domain
	Factors  []float64 // a number that is not drawn again is multiplied by one of these, chosen at random
	Perturb  []string  // names whose values change; all others are the donor's
}

// Explore returns a perturbed configuration, and in words what was done to each value. With the
// probability e.Resample, a value is drawn again from its domain. Otherwise a number is
// multiplied by one of the factors and kept within its domain, and the value of a list is
// replaced by one of its neighbors there. A whole number that the factor does not change goes one
// up or down. The values drawn depend on the configuration, e and the generator alone.
func (s Space) Explore(config map[string]any, e Exploration, random *rand.Rand) (map[string]any, []string) {
	out, how := map[string]any{}, []string{}
	for _, name := range s.names {
		out[name] = config[name]
		if !slices.Contains(e.Perturb, name) {
			continue
		}
		var done string
		out[name], done = s.of[name].explore(config[name], e, random)
		how = append(how, fmt.Sprintf("%s %s → %s (%s)", name, brief(config[name]), brief(out[name]), done))
	}
	return out, how
}

// explore returns another value of a domain, and what it is.
func (d domain) explore(old any, e Exploration, random *rand.Rand) (v any, done string) {
	const again = "drawn again"
	if random.Float64() < e.Resample {
		return d.any(random), again
	}
	if d.kind == choice || d.kind == grid {
		at := slices.IndexFunc(d.values, func(v any) bool { return reflect.DeepEqual(v, old) })
		if at < 0 {
			return d.any(random), again
		}
		if random.IntN(2) == 0 {
			return d.values[max(at-1, 0)], "the one before"
		}
		return d.values[min(at+1, len(d.values)-1)], "the one after"
	}
	factor := e.Factors[random.IntN(len(e.Factors))]
	number, ok := old.(float64)
	if !ok {
		return d.any(random), again
	}
	scaled := number * factor
	if d.kind == integer {
		if scaled = math.Round(scaled); scaled == number && factor != 1 {
			scaled += math.Copysign(1, factor-1) * math.Copysign(1, number)
		}
	}
	return min(max(scaled, d.lo), d.hi), "× " + strconv.FormatFloat(factor, 'g', -1, 64)
}

// any returns a random value of a domain.
func (d domain) any(random *rand.Rand) any {
	if d.kind == grid {
		return d.values[random.IntN(len(d.values))]
	}
	return d.draw(random)
}

// brief returns a value of a configuration for people.
func brief(value any) string {
	if f, ok := value.(float64); ok {
		return strconv.FormatFloat(f, 'g', 4, 64)
	}
	return Text(value)
}

// Random returns the names whose values are drawn at random: those that have a domain and no grid.
func (s Space) Random() (names []string) {
	for _, name := range s.names {
		if kind := s.of[name].kind; kind != "" && kind != grid {
			names = append(names, name)
		}
	}
	return names
}
