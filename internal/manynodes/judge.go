package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// verdict is what a judged cluster did.
type verdict struct {
	Attempts   int      `json:"attempts"`
	Lives      int      `json:"lives"`
	Steps      int64    `json:"steps"`
	Saved      int      `json:"saved"`
	Aborted    int      `json:"aborted"`
	Samples    int      `json:"samples"`
	AfterThaw  float64  `json:"ran_after_thaw_seconds"` // the longest that an old rank ran
	Findings   []string `json:"findings"`
	abortNames []string
}

func (v *verdict) find(format string, args ...any) {
	v.Findings = append(v.Findings, fmt.Sprintf(format, args...))
}

// judge judges what happened in a cluster after all its trainers have ended. allowance is
// how long old ranks of a node that was thawed may run.
func (c *cluster) judge(ctx context.Context, allowance time.Duration) (v verdict, err error) {
	for _, m := range c.nodes {
		n, err := c.workersOn(m)
		if err != nil {
			return v, err
		}
		if n > 0 {
			v.find("%d workers are left on %s", n, m.Name())
		}
	}
	samples, err := c.sampler.close()
	c.sampler = nil
	if err != nil {
		return v, err
	}
	lives, err := readLives(c.lives, 0)
	if err != nil {
		return v, err
	}
	v.Lives, v.Samples = len(lives), len(samples)
	// Ranks of a single attempt overlap with no others, and may end before the sampler of a busy machine sees them.
	if len(lives) == 0 || len(samples) == 0 && len(byAttempt(lives)) > 1 {
		v.find("%d processes were seen and %d have records: nothing is proved", len(samples), len(lives))
	}
	c.overlaps(&v, lives, samples, allowance)
	places(&v, lives)
	if c.elastic {
		elastic(&v, lives)
	} else {
		values(&v, lives, c.want)
	}
	return v, c.verify(ctx, &v, lives)
}

// overlaps finds ranks that ran after a rank of a later attempt had started.
func (c *cluster) overlaps(v *verdict, lives []life, samples []seen, allowance time.Duration) {
	starts := map[int]int64{} // the first start of each attempt
	began := func(attempt int, at int64) {
		if old, ok := starts[attempt]; !ok || at < old {
			starts[attempt] = at
		}
	}
	for _, l := range lives {
		began(l.Attempt, l.Start)
	}
	for _, s := range samples {
		began(s.attempt, s.first)
	}
	v.Attempts = len(starts)
	ran := func(what, host string, attempt, rank int, last int64) {
		for later, start := range starts {
			if later <= attempt || last <= start {
				continue
			}
			m := c.node(host)
			if m.afterThaw(last, allowance) {
				m.mu.Lock()
				for _, f := range m.frozen {
					if f.until != 0 && last >= f.until && last < f.until+int64(allowance) {
						v.AfterThaw = max(v.AfterThaw, time.Duration(last-f.until).Seconds())
					}
				}
				m.mu.Unlock()
				continue
			}
			v.find("%s: rank %d of attempt %d on %s ran %v after attempt %d had started", what, rank, attempt, host, time.Duration(last-start), later)
		}
	}
	for _, l := range lives {
		ran("its record", l.Host, l.Attempt, l.Rank, l.Last)
	}
	for _, s := range samples {
		ran("/proc", s.host, s.attempt, s.rank, s.last)
	}
}

// places checks that the nodes of each attempt agree, and that ranks keep their nodes.
func places(v *verdict, lives []life) {
	attempts := byAttempt(lives)
	at := map[string]map[int]int{} // by host: the node index of each of its ranks
	ports := map[int]int{}
	procs := 0 // ranks of a node
	for _, group := range attempts {
		of := map[string]int{}
		for _, l := range group {
			of[l.Host]++
			procs = max(procs, of[l.Host])
		}
	}
	for attempt := range slices.Max(append(keys(attempts), 0)) + 1 {
		group := attempts[attempt]
		ranks := map[int]bool{}
		now := map[string]map[int]int{}
		for _, l := range group {
			one := group[0]
			if l.Restart != one.Restart || l.MasterPort != one.MasterPort || l.MasterAddr != one.MasterAddr || l.World != one.World || l.Job != one.Job {
				v.find("attempt %d: rank %d has %+v and rank %d has %+v", attempt, l.Rank, l.identity, one.Rank, one.identity)
			}
			if ranks[l.Rank] {
				v.find("attempt %d: two processes have rank %d", attempt, l.Rank)
			}
			ranks[l.Rank] = true
			if now[l.Host] == nil {
				now[l.Host] = map[int]int{}
			}
			now[l.Host][l.Rank] = l.Node
		}
		for host, of := range now {
			for rank, node := range of {
				if was := at[host]; !kept(was, rank, node, procs) {
					v.find("attempt %d: %s has rank %d as node %d, and had %v before", attempt, host, rank, node, was)
				}
			}
			if at[host] == nil {
				at[host] = map[int]int{}
			}
			for rank, node := range of {
				at[host][rank] = node
			}
		}
		if len(group) > 0 {
			ports[group[0].MasterPort]++
		}
	}
}

// kept reports whether a rank may be on a host as a node index, if the host had these ranks with their indexes before: it
// had that one, or the one has made no record because its attempt ended too early.
func kept(was map[int]int, rank, node, procs int) bool {
	for other, index := range was {
		if index != node {
			return false
		}
		if other == rank {
			return true
		}
	}
	return len(was) < procs
}

func keys(of map[int][]life) (all []int) {
	for k := range of {
		all = append(all, k)
	}
	return all
}

// values compares every loss with that of an unbroken run, and every start with what was
// committed before. want has the losses of programs other than [worker].
func values(v *verdict, lives []life, want []string) {
	type ack struct{ at, step int64 }
	var acks []ack
	names := map[string]bool{}
	world := 0
	for _, l := range lives {
		world = max(world, l.World)
		v.Steps = max(v.Steps, l.step())
		for _, line := range l.Lines {
			switch line.What {
			case whatSaved:
				acks = append(acks, ack{line.At, line.Step})
				names[line.Saved] = true
			case whatAborted:
				v.Aborted++
				v.abortNames = append(v.abortNames, line.Why)
			}
		}
	}
	v.Saved = len(names)
	if want == nil {
		for _, loss := range unbroken(world, v.Steps) {
			want = append(want, bits(loss))
		}
	}
	for _, l := range lives {
		if l.World != world {
			v.find("attempt %d has %d ranks, others %d", l.Attempt, l.World, world)
			return
		}
		next := int64(1)
		for _, line := range l.Lines {
			switch line.What {
			case whatLoaded:
				next = line.Step + 1
			case whatStep:
				if line.Step != next {
					v.find("attempt %d: rank %d trains step %d after step %d", l.Attempt, l.Rank, line.Step, next-1)
				}
				next = line.Step + 1
				if line.Step > int64(len(want)) {
					v.find("attempt %d: rank %d trains step %d, an unbroken run ends with %d", l.Attempt, l.Rank, line.Step, len(want))
					break
				}
				if line.Loss != want[line.Step-1] {
					v.find("attempt %d: rank %d has the loss %s in step %d, an unbroken run has %s", l.Attempt, l.Rank, line.Loss, line.Step, want[line.Step-1])
				}
			}
		}
		for _, a := range acks {
			if first := l.first(); first > 0 && a.at < l.Start && first <= a.step {
				v.find("attempt %d: rank %d begins with step %d, although step %d was committed before", l.Attempt, l.Rank, first, a.step)
				break
			}
		}
	}
}

// first returns the first step that a life has trained, 0 for none.
func (l life) first() int64 {
	for _, line := range l.Lines {
		if line.What == whatStep {
			return line.Step
		}
	}
	return 0
}

// verify has the store verify every byte, and looks for each acknowledged checkpoint.
func (c *cluster) verify(ctx context.Context, v *verdict, lives []life) error {
	out, err := c.ckptstore(ctx, "verify", "--json")
	var verified struct{ Findings []json.RawMessage }
	if jerr := json.Unmarshal(out, &verified); jerr != nil {
		return errors.Join(err, fmt.Errorf("verify: %.300q: %w", out, jerr))
	}
	for _, f := range verified.Findings {
		v.find("verify: %s", f)
	}
	if err != nil && len(verified.Findings) == 0 {
		return err
	}
	out, err = c.ckptstore(ctx, "ls", "--all", "--json")
	if err != nil {
		return err
	}
	var listed any
	if err := json.Unmarshal(out, &listed); err != nil {
		return fmt.Errorf("ls: %.300q: %w", out, err)
	}
	for _, l := range lives {
		for _, line := range l.Lines {
			if line.What == whatSaved && !slices.Contains(texts(listed), line.Saved) {
				v.find("checkpoint %s of step %d was acknowledged and is not listed", line.Saved, line.Step)
			}
		}
	}
	return nil
}

// texts returns all strings in a JSON value.
func texts(v any) (all []string) {
	switch v := v.(type) {
	case string:
		return []string{v}
	case []any:
		for _, x := range v {
			all = append(all, texts(x)...)
		}
	case map[string]any:
		for _, x := range v {
			all = append(all, texts(x)...)
		}
	}
	return all
}
