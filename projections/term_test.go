package projections

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// The stop of a group by a coordinator that another has replaced changes nothing: the group lives, and
// ends when its coordinator records it. So it is whatever the versions that wrote the facts.
func TestStopOfReplacedCoordinator(t *testing.T) {
	t.Parallel()
	const (
		first  = `s group.started {"attempt":1,"job":"J","world_size":1,"ranks":[{"rank":0,"node":1,"local_rank":0}],"backend":"none"}` // e2
		second = `s group.coordinator {"attempt":1,"job":"J","node":1,"host":"b","reason":"silent"}`                                    // e3
		third  = `s group.coordinator {"attempt":1,"job":"J","node":0,"host":"a","reason":"silent"}`                                    // e4
	)
	for name, c := range map[string]struct {
		log  []string
		want string // reason of the attempt's stop; empty: it has not stopped
	}{
		"one coordinator":                {[]string{first, `n0 group.stopped {"attempt":1,"reason":"done","term":"e2"}`}, "done"},
		"one coordinator, old version":   {[]string{first, `n0 group.stopped {"attempt":1,"reason":"done"}`}, "done"},
		"the first of two":               {[]string{first, second, `n0 group.stopped {"attempt":1,"reason":"late","term":"e2"}`}, ""},
		"the first of two, old version":  {[]string{first, second, `n0 group.stopped {"attempt":1,"reason":"late"}`}, ""},
		"the second":                     {[]string{first, second, `n1 group.stopped {"attempt":1,"reason":"done","term":"e3"}`}, "done"},
		"the second, old version":        {[]string{first, second, `n1 group.stopped {"attempt":1,"reason":"done"}`}, "done"},
		"both":                           {[]string{first, second, `n0 group.stopped {"attempt":1,"reason":"late","term":"e2"}`, `n1 group.stopped {"attempt":1,"reason":"done","term":"e3"}`}, "done"},
		"the first before the second":    {[]string{first, `n0 group.stopped {"attempt":1,"reason":"done","term":"e2"}`, second}, "done"},
		"a node that coordinates again":  {[]string{first, second, third, `n0 group.stopped {"attempt":1,"reason":"late","term":"e2"}`}, ""},
		"the third":                      {[]string{first, second, third, `n0 group.stopped {"attempt":1,"reason":"done","term":"e4"}`}, "done"},
		"the next group has its own":     {[]string{first, second, strings.Replace(first, `"attempt":1`, `"attempt":2`, 1), `n1 group.stopped {"attempt":2,"reason":"done","term":"e4"}`}, ""},
		"a group started just before it": {[]string{first, strings.Replace(first, `"attempt":1`, `"attempt":2`, 1), second, `n0 group.stopped {"attempt":2,"reason":"late","term":"e3"}`}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			for _, line := range append([]string{`s trial.created {}`}, c.log...) {
				if err := s.add(line); err != nil {
					t.Fatal(err)
				}
			}
			attempts, err := Attempts(s.rows, s.run, s.trial)
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(attempts, func(a Attempt) bool { return a.Attempt == 1 })
			if a := attempts[i]; a.Reason != c.want || a.StoppedAt.IsZero() != (c.want == "") {
				t.Errorf("stopped at %v: %q, want %q", a.StoppedAt, a.Reason, c.want)
			}
			if i = slices.IndexFunc(attempts, func(a Attempt) bool { return a.Attempt == 2 }); i >= 0 {
				if a, ends := attempts[i], strings.HasPrefix(name, "the next"); a.StoppedAt.IsZero() == ends {
					t.Errorf("attempt 2 stopped at %v", a.StoppedAt)
				}
			}
		})
	}
}

// The end of a job by a coordinator that another has replaced does not end the job: it continues under the
// other, also if the group has ended. So it is whatever the versions that wrote the facts.
func TestJobEndOfReplacedCoordinator(t *testing.T) {
	t.Parallel()
	const (
		first  = `s group.started {"attempt":1,"job":"J","world_size":1,"ranks":[{"rank":0,"node":1,"local_rank":0}],"backend":"none"}` // e2
		second = `s group.coordinator {"attempt":1,"job":"J","node":1,"host":"b","reason":"silent"}`                                    // e3
		third  = `s group.coordinator {"attempt":1,"job":"J","node":0,"host":"a","reason":"silent"}`                                    // e4
		late   = `n0 job.ended {"job":"J","exit_code":1,"reason":"late","term":"e2"}`
	)
	next := strings.Replace(first, `"attempt":1`, `"attempt":2`, 1)
	for name, c := range map[string]struct {
		log  []string
		want string // reason of the end of the job; empty: it has not ended
	}{
		"one coordinator":                 {[]string{first, `n0 job.ended {"job":"J","exit_code":1,"reason":"done","term":"e2"}`}, "done"},
		"one coordinator, old version":    {[]string{first, `n0 job.ended {"job":"J","exit_code":1,"reason":"done"}`}, "done"},
		"the first of two":                {[]string{first, second, late}, ""},
		"the first of two, old version":   {[]string{first, second, `n0 job.ended {"job":"J","exit_code":1,"reason":"late"}`}, ""},
		"the first, after its group":      {[]string{first, `n0 group.stopped {"attempt":1,"reason":"done","term":"e2"}`, second, late}, ""},
		"the first, after the next group": {[]string{first, second, next, late}, ""},
		"the second":                      {[]string{first, second, `n1 job.ended {"job":"J","exit_code":0,"reason":"done","term":"e3"}`}, "done"},
		"the second, old version":         {[]string{first, second, `n1 job.ended {"job":"J","exit_code":0,"reason":"done"}`}, "done"},
		"the second, after its own group": {[]string{first, second, next, `n1 job.ended {"job":"J","exit_code":0,"reason":"done","term":"e3"}`}, "done"},
		"both":                            {[]string{first, second, late, `n1 job.ended {"job":"J","exit_code":0,"reason":"done","term":"e3"}`}, "done"},
		"the first before the second":     {[]string{first, `n0 job.ended {"job":"J","exit_code":0,"reason":"done","term":"e2"}`, second}, "done"},
		"a node that coordinates again":   {[]string{first, second, third, late}, ""},
		"the third":                       {[]string{first, second, third, `n0 job.ended {"job":"J","exit_code":0,"reason":"done","term":"e4"}`}, "done"},
		"another job of the run":          {[]string{first, second, `n0 job.ended {"job":"K","exit_code":0,"reason":"done"}`, late}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			for _, line := range append([]string{`s trial.created {}`}, c.log...) {
				if err := s.add(line); err != nil {
					t.Fatal(err)
				}
			}
			job, _, err := load[Job](s.rows, key(keyJob, s.run, "J"))
			if err != nil {
				t.Fatal(err)
			}
			if job.Reason != c.want || job.Ended != (c.want != "") {
				t.Errorf("the job has ended: %v, %q, want %q", job.Ended, job.Reason, c.want)
			}
			if strings.HasPrefix(name, "another") {
				if other, _, err := load[Job](s.rows, key(keyJob, s.run, "K")); err != nil || !other.Ended {
					t.Errorf("the other job: %+v, %v", other, err)
				}
			}
		})
	}
}

// A node that a replaced coordinator counts as lost may live: it was the coordinator that was cut off.
func TestNodeLostByReplacedCoordinator(t *testing.T) {
	t.Parallel()
	const (
		joined = `n0 job.node_joined {"job":"J","node":2,"host":"c"}`
		first  = `s group.started {"attempt":1,"job":"J","world_size":1,"ranks":[{"rank":0,"node":1,"local_rank":0}],"backend":"none"}` // e3
		second = `s group.coordinator {"attempt":1,"job":"J","node":1,"host":"b","reason":"silent"}`                                    // e4
		by     = `%s job.node_left {"job":"J","node":2,"reason":"silent","lost":true%s}`
	)
	for name, c := range map[string]struct {
		log  []string
		left bool
	}{
		"one coordinator":               {[]string{first, fmt.Sprintf(by, "n0", `,"term":"e3"`)}, true},
		"before any group":              {[]string{fmt.Sprintf(by, "n0", ""), first}, true},
		"the first of two":              {[]string{first, second, fmt.Sprintf(by, "n0", `,"term":"e3"`)}, false},
		"the first of two, old version": {[]string{first, second, fmt.Sprintf(by, "n0", "")}, false},
		"the first before the second":   {[]string{first, fmt.Sprintf(by, "n0", `,"term":"e3"`), second}, true},
		"the second":                    {[]string{first, second, fmt.Sprintf(by, "n1", `,"term":"e4"`)}, true},
		"the second, old version":       {[]string{first, second, fmt.Sprintf(by, "n1", "")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			for _, line := range append([]string{`s trial.created {}`, joined}, c.log...) {
				if err := s.add(line); err != nil {
					t.Fatal(err)
				}
			}
			job, _, err := load[Job](s.rows, key(keyJob, s.run, "J"))
			if err != nil || len(job.Nodes) != 1 {
				t.Fatalf("%+v, %v", job, err)
			}
			if n := job.Nodes[0]; n.Lost != c.left || n.LeftAt.IsZero() == c.left {
				t.Errorf("lost %v at %v, want %v", n.Lost, n.LeftAt, c.left)
			}
		})
	}
}
