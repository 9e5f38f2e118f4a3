package logs

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Std names outputs, as torchrun's -r and -t do: 0 none, 1 standard output,
// 2 standard error, 3 both.
type Std int

func (s Std) has(stream Stream) bool {
	if stream == Out {
		return s&1 != 0
	}
	return s&2 != 0
}

// PerRank is a [Std] for each local rank.
type PerRank struct {
	all   Std
	ranks map[int]Std // overrides all, if not nil
}

func (p PerRank) of(rank int) Std {
	if p.ranks != nil {
		return p.ranks[rank]
	}
	return p.all
}

// ParsePerRank parses 0, 1, 2 or 3 for all ranks, or RANK:N pairs such as
// "0:3,1:2"; other ranks have 0.
func ParsePerRank(text string) (p PerRank, err error) {
	bad := func() (PerRank, error) {
		return PerRank{}, fmt.Errorf("%q: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:N pairs such as 0:3,1:2", text)
	}
	std := func(text string) (Std, bool) {
		if len(text) != 1 || text[0] < '0' || text[0] > '3' {
			return 0, false
		}
		return Std(text[0] - '0'), true
	}
	if all, ok := std(text); ok {
		return PerRank{all: all}, nil
	}
	p.ranks = map[int]Std{}
	for pair := range strings.SplitSeq(strings.TrimSuffix(text, ","), ",") {
		left, right, ok := strings.Cut(pair, ":")
		rank, err := strconv.Atoi(left)
		if !ok || err != nil || rank < 0 {
			return bad()
		}
		if _, twice := p.ranks[rank]; twice {
			return PerRank{}, fmt.Errorf("%q names local rank %d twice", text, rank)
		}
		if p.ranks[rank], ok = std(right); !ok {
			return bad()
		}
	}
	return p, nil
}

// Routes configures where the workers' output goes, by local rank. Redirected
// output goes to a file instead of the terminal, teed output to both, and the
// rest to the terminal.
type Routes struct {
	Redirects, Tee PerRank
	Shown          []int // the ranks that the terminal shows; nil: all
}

// Of reports whether an output of a local rank goes to a file, to the
// terminal, or to both.
func (r Routes) Of(rank int, s Stream) (file, terminal bool) {
	tee := r.Tee.of(rank).has(s)
	file = tee || r.Redirects.of(rank).has(s)
	return file, (tee || !file) && (r.Shown == nil || slices.Contains(r.Shown, rank))
}
