package trainer

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/launch"
)

// placement describes the nodes of a job.
type placement struct {
	min, max int
	rank     int    // of this node
	ranked   bool   // rank was given
	master   string // host, empty if unknown
	said     string // the flag or variable that gave the number
}

// count returns the number of nodes, N or MIN:MAX.
func (n placement) count() string {
	if n.min == n.max {
		return fmt.Sprint(n.max)
	}
	return fmt.Sprintf("%d:%d", n.min, n.max)
}

// placed returns the nodes that flags and the environment of Slurm and Kubernetes
// specify. A flag takes precedence over the environment. If the job has one node,
// its number is 0, even if several such jobs run.
func (o *torchrunOptions) placed(getenv func(string) string) (n placement, err error) {
	said, count := "--nnodes "+o.nnodes, o.nnodes
	if !o.asked("nnodes") {
		said, count = "--nnodes 1", "1"
		for _, name := range []string{"SLURM_STEP_NUM_NODES", "SLURM_NNODES"} {
			if v := getenv(name); v != "" {
				said, count = name+"="+v, v
				break
			}
		}
	}
	n.said = said
	low, high, ranged := strings.Cut(count, ":")
	if !ranged {
		high = low
	}
	if n.min, err = strconv.Atoi(low); err == nil {
		n.max, err = strconv.Atoi(high)
	}
	if err != nil || n.min < 1 || n.max < n.min {
		return n, fmt.Errorf("%w: %s: give a number of nodes of 1 or more, or MIN:MAX", launch.ErrConfig, said)
	}
	n.rank, said = o.nodeRank, fmt.Sprint("--node-rank ", o.nodeRank)
	if n.max == 1 {
		if n.rank != 0 {
			return n, fmt.Errorf("%w: %s: the only node of a job has rank 0; give --nnodes too, or leave it out", launch.ErrConfig, said)
		}
		return n, nil
	}
	n.ranked = o.asked("node-rank")
	beyond := false // a scheduler may start more nodes than a group has: spares
	if !n.ranked {
		for _, name := range []string{"SLURM_NODEID", "JOB_COMPLETION_INDEX"} {
			v := getenv(name)
			if v == "" {
				continue
			}
			said, n.ranked, beyond = name+"="+v, true, true
			if n.rank, err = strconv.Atoi(v); err != nil {
				return n, fmt.Errorf("%w: %s: want the number of this node", launch.ErrConfig, said)
			}
			break
		}
	}
	if n.rank < 0 || n.rank >= n.max && !beyond {
		return n, fmt.Errorf("%w: %s: with %d nodes give a number from 0 to %d", launch.ErrConfig, said, n.max, n.max-1)
	}
	if o.asked("master-addr") {
		n.master = o.masterAddr
		return n, nil
	}
	for _, name := range []string{"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"} {
		if list := getenv(name); list != "" {
			hosts, err := slurmHosts(list)
			if err != nil {
				return n, fmt.Errorf("%w: %s: %w", launch.ErrConfig, name, err)
			}
			n.master = hosts[0]
			break
		}
	}
	return n, nil
}

// maxHosts bounds how many hosts a node list may expand to.
const maxHosts = 1 << 16

// slurmHosts expands a node list of Slurm, such as n[001-003,7],x, in its order.
func slurmHosts(list string) (hosts []string, err error) {
	bad := func(why string) ([]string, error) {
		return nil, fmt.Errorf("node list %q: %s: want names such as n[001-003,7],x", list, why)
	}
	for _, entry := range splitOutside(list) {
		if entry == "" {
			return bad("an empty name")
		}
		names := []string{""}
		for entry != "" {
			plain, rest, bracket := strings.Cut(entry, "[")
			if strings.Contains(plain, "]") {
				return bad("a ] without its [")
			}
			for i := range names {
				names[i] += plain
			}
			entry = rest
			if !bracket {
				continue
			}
			ranges, rest, closed := strings.Cut(rest, "]")
			if !closed {
				return bad("a [ without its ]")
			}
			numbers, err := slurmNumbers(ranges)
			if err != nil {
				return bad(err.Error())
			}
			if len(names)*len(numbers) > maxHosts {
				return bad(fmt.Sprint("more than ", maxHosts, " hosts"))
			}
			var more []string
			for _, name := range names {
				for _, number := range numbers {
					more = append(more, name+number)
				}
			}
			names, entry = more, rest
		}
		if hosts = append(hosts, names...); len(hosts) > maxHosts {
			return bad(fmt.Sprint("more than ", maxHosts, " hosts"))
		}
	}
	return hosts, nil
}

// splitOutside splits at commas outside brackets.
func splitOutside(list string) (parts []string) {
	depth, start := 0, 0
	for i, r := range list {
		switch {
		case r == '[':
			depth++
		case r == ']':
			depth--
		case r == ',' && depth == 0:
			parts = append(parts, list[start:i])
			start = i + 1
		}
	}
	return append(parts, list[start:])
}

// slurmNumbers expands 001-003,7. Numbers of a range have as many digits as its
// first.
func slurmNumbers(ranges string) (numbers []string, err error) {
	for _, r := range strings.Split(ranges, ",") {
		first, last, ranged := strings.Cut(r, "-")
		if !ranged {
			last = first
		}
		low, lerr := strconv.ParseUint(first, 10, 32)
		high, herr := strconv.ParseUint(last, 10, 32)
		if lerr != nil || herr != nil || high < low {
			return nil, fmt.Errorf("%q is not a range", r)
		}
		if high-low >= maxHosts {
			return nil, fmt.Errorf("more than %d hosts", maxHosts)
		}
		for n := low; n <= high; n++ {
			numbers = append(numbers, fmt.Sprintf("%0*d", len(first), n))
		}
	}
	return numbers, nil
}
