package retention

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrPolicy reports a text that is not a policy.
var ErrPolicy = problem.New(problem.Invalid, "bad retention policy")

// Policy selects the checkpoints that stay. The zero value keeps all.
type Policy struct {
	Last       int   // newest of the line; 0: no such rule
	Every      int64 // steps; 0: no such rule
	Best       []Best
	KeepTagged bool
	Superseded Superseded
}

// Best is a rule for the best by a metric.
type Best struct {
	N        int // at least 1
	Metric   string
	Greatest bool // the greatest value is the best, not the least
}

// Superseded selects what happens to checkpoints outside the line.
type Superseded int

// The treatments of superseded checkpoints.
const (
	KeepSuperseded Superseded = iota
	DeleteSuperseded
)

func (s Superseded) String() string {
	if s == DeleteSuperseded {
		return "delete"
	}
	return "keep"
}

// keepsLine reports whether no rule is about the line.
func (p Policy) keepsLine() bool {
	return p.Last == 0 && p.Every == 0 && len(p.Best) == 0 && !p.KeepTagged
}

// Metrics returns the metrics in the policy, sorted.
func (p Policy) Metrics() []string {
	var names []string
	for _, b := range p.Best {
		names = append(names, b.Metric)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// String returns the text of the policy: [Parse] returns the same policy for it.
func (p Policy) String() string {
	var items []string
	if p.Last > 0 {
		items = append(items, fmt.Sprintf("last=%d", p.Last))
	}
	if p.Every > 0 {
		items = append(items, fmt.Sprintf("every=%dsteps", p.Every))
	}
	for _, b := range p.Best {
		items = append(items, b.String())
	}
	if p.KeepTagged {
		items = append(items, "keep-tagged")
	}
	if p.Superseded != KeepSuperseded || len(items) == 0 {
		items = append(items, "superseded="+p.Superseded.String())
	}
	return strings.Join(items, ",")
}

func (b Best) String() string {
	mode := "min"
	if b.Greatest {
		mode = "max"
	}
	return fmt.Sprintf("best=%d:%s:%s", b.N, escape(b.Metric), mode)
}

// Parse reads a policy. Its errors are [ErrPolicy] and contain the wrong item and its correct
// form.
func Parse(text string) (Policy, error) {
	var p Policy
	seen := map[string]bool{}
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		key, value, _ := strings.Cut(item, "=")
		if err := p.set(item, key, value); err != nil {
			return Policy{}, fmt.Errorf("%w %q: %w", ErrPolicy, text, err)
		}
		if key == "best" { // a second item for the same end only hides a mistake
			b := p.Best[len(p.Best)-1]
			key = fmt.Sprintf("best of %s:%t", b.Metric, b.Greatest)
		}
		if seen[key] {
			return Policy{}, fmt.Errorf("%w %q: item %q comes after another of its kind: give one", ErrPolicy, text, item)
		}
		seen[key] = true
	}
	return p, nil
}

// set applies one item.
func (p *Policy) set(item, key, value string) (err error) {
	switch {
	case key == "last":
		p.Last, err = count(item, value, "last=2")
	case key == "every":
		var n int
		n, err = count(item, strings.TrimSuffix(value, "steps"), "every=1000steps")
		p.Every = int64(n)
	case key == "best":
		var b Best
		b, err = parseBest(item, value)
		p.Best = append(p.Best, b)
	case item == "keep-tagged":
		p.KeepTagged = true
	case item == "superseded=keep":
		p.Superseded = KeepSuperseded
	case item == "superseded=delete":
		p.Superseded = DeleteSuperseded
	default:
		err = fmt.Errorf("item %q: want last=N, every=Nsteps, best=N:METRIC:min or :max, keep-tagged, superseded=delete or superseded=keep", item)
	}
	return err
}

func count(item, value, like string) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("item %q: want a number of 1 or more, as in %s", item, like)
	}
	return n, nil
}

func parseBest(item, value string) (Best, error) {
	head, rest, _ := strings.Cut(value, ":")
	end := strings.LastIndexByte(rest, ':')
	if end < 1 || rest[end+1:] != "min" && rest[end+1:] != "max" {
		return Best{}, fmt.Errorf("item %q: want the count, the metric and min or max, as in best=1:loss:min", item)
	}
	n, err := count(item, head, "best=1:loss:min")
	if err != nil {
		return Best{}, err
	}
	metric, err := unescape(rest[:end])
	if err != nil {
		return Best{}, fmt.Errorf("item %q: %w", item, err)
	}
	return Best{N: n, Metric: metric, Greatest: rest[end+1:] == "max"}, nil
}

// escape converts a metric's name to a part of an item.
func escape(name string) string {
	var b strings.Builder
	for i := range len(name) {
		if c := name[i]; c > ' ' && c != ',' && c != '%' && c < 0x7f {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

func unescape(text string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] != '%' {
			b.WriteByte(text[i])
			continue
		}
		if i+3 > len(text) {
			return "", errors.New("a % in a metric's name is written %25")
		}
		n, err := strconv.ParseUint(text[i+1:i+3], 16, 8)
		if err != nil {
			return "", errors.New("a % in a metric's name is written %25")
		}
		b.WriteByte(byte(n))
		i += 2
	}
	return b.String(), nil
}
