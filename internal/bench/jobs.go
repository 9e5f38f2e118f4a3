package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// jobsBench is `bench jobs --json`.
type jobsBench struct {
	Bench   string      `json:"bench"`
	Seconds float64     `json:"seconds"` // how long each number of jobs is watched
	Points  []jobsPoint `json:"points"`
}

// jobsPoint is the cost of a number of parallel jobs. CPU is that of the store's owner,
// and of the processes that run the jobs, without their workers.
type jobsPoint struct {
	Jobs        int     `json:"jobs"`
	Events      uint64  `json:"events"` // events appended in that time
	Owner       float64 `json:"owner_cpu_seconds"`
	OwnerPerJob float64 `json:"owner_cpu_per_job"` // share of a CPU
	Trainers    float64 `json:"trainers_cpu_seconds"`
	PerJob      float64 `json:"trainer_cpu_per_job"` // share of a CPU
}

// Hidden commands that the benchmark starts: a job, and its worker.
const jobCommand, jobRankCommand = "bench-job", "bench-job-rank"

const (
	jobReports = 200 * time.Millisecond // between two reports of a job
	jobSaves   = 10                     // reports between two saves
)

func (a *bench) jobsVerb() *cobra.Command {
	b, dir := jobsBench{Bench: "jobs"}, ""
	var jobs []int
	c := &cobra.Command{
		Use: "jobs", Short: "Time what jobs cost the owner of their store", Args: console.Args(cobra.NoArgs),
		Long: `Run a number of jobs in parallel with an owner of their store, and measure the
CPU time of the owner and of the trainers for --seconds. Each job has one
worker, which reports five times a second and saves a small tensor every two
seconds. The store is in a new directory, which is removed afterwards.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if len(jobs) == 0 || b.Seconds <= 0 {
				return console.Usagef("--jobs %v --seconds %v: want at least one number, and a time", jobs, b.Seconds)
			}
			for _, n := range jobs {
				if n < 1 {
					return console.Usagef("--jobs %d: want at least 1", n)
				}
				err := scratch(dir, func(dir string) error {
					p, err := a.jobsAt(c.Context(), filepath.Join(dir, "store"), n, b.Seconds)
					b.Points = append(b.Points, p)
					return err
				})
				if err != nil {
					return err
				}
			}
			return console.Emit(a.Console, b, b.Points, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "JOBS", "EVENTS", "OWNER CPU", "A JOB", "TRAINERS CPU", "A JOB")
				for _, p := range b.Points {
					console.Row(w, p.Jobs, p.Events, seconds(p.Owner), fmt.Sprintf("%.2g%%", 100*p.OwnerPerJob), seconds(p.Trainers), fmt.Sprintf("%.2g%%", 100*p.PerJob))
				}
			})
		},
	}
	f := c.Flags()
	f.IntSliceVar(&jobs, "jobs", []int{1, 30}, "numbers of jobs at a time")
	f.Float64Var(&b.Seconds, "seconds", 15, "how long the jobs are watched")
	f.StringVar(&dir, "dir", ".", "parent of the new directory, which determines the measured disk")
	return c
}

// jobsAt runs n jobs and watches them after each has committed a save.
func (a *bench) jobsAt(ctx context.Context, dir string, n int, watched float64) (p jobsPoint, err error) {
	if _, err := store.Init(ctx, dir, ""); err != nil {
		return p, err
	}
	m, err := newAgeMeter(agedStore{dir: dir}, a)
	if err != nil {
		return p, err
	}
	owner, err := m.serve(ctx)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, owner.end(syscall.SIGTERM)) }()
	if err := owner.says(ctx, "serving"); err != nil {
		return p, err
	}
	trainers := make([]*ageOwner, 0, n)
	defer func() {
		for _, t := range trainers {
			_ = t.c.Process.Signal(syscall.SIGTERM) // signal all first; their ends are awaited below
		}
		for _, t := range trainers {
			err = errors.Join(err, t.end(syscall.SIGTERM))
		}
	}()
	for i := range n {
		t := &ageOwner{m: m, stderr: &transcript{}, done: make(chan error, 1)}
		t.c = exec.CommandContext(ctx, m.self, "--store", dir, "bench", jobCommand, runName(i))
		t.c.Stderr = t.stderr
		if err := t.c.Start(); err != nil {
			return p, err
		}
		go func() { t.done <- t.c.Wait() }()
		trainers = append(trainers, t)
	}
	for i, t := range trainers {
		if err := t.until(ctx, "committed a save", func() bool { return owner.asked("resolve?ref="+runName(i), 0) }); err != nil {
			return p, err
		}
	}
	if err := owner.until(ctx, "noted the log's end", func() bool { _, err := owner.logEnd(); return err == nil }); err != nil {
		return p, err
	}
	cpu := func() (of, all float64, end uint64, err error) {
		if of, err = cpuOf(owner.c.Process.Pid); err != nil {
			return 0, 0, 0, err
		}
		for _, t := range trainers {
			one, err := cpuOf(t.c.Process.Pid)
			if err != nil {
				return 0, 0, 0, fmt.Errorf("%w: %s", err, t.stderr)
			}
			all += one
		}
		end, err = owner.logEnd()
		return of, all, end, err
	}
	of, all, from, err := cpu()
	if err != nil {
		return p, err
	}
	began := time.Now()
	select {
	case <-time.After(time.Duration(watched * float64(time.Second))):
	case <-ctx.Done():
		return p, ctx.Err()
	}
	then, allThen, until, err := cpu()
	took := time.Since(began).Seconds()
	p = jobsPoint{Jobs: n, Events: until - from, Owner: then - of, Trainers: allThen - all}
	p.OwnerPerJob, p.PerJob = p.Owner/took/float64(n), p.Trainers/took/float64(n)
	return p, err
}

// asked reports whether the owner of the store answers a query without an error. If pid
// is not 0, the owner must be that process.
func (o *ageOwner) asked(question string, pid int) bool {
	var card struct {
		PID int    `json:"pid"`
		API string `json:"api"`
	}
	text, err := os.ReadFile(filepath.Join(o.m.dir, "owner.json"))
	if err != nil || json.Unmarshal(text, &card) != nil || pid != 0 && card.PID != pid {
		return false
	}
	client := http.Client{Timeout: agePatience, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", card.API)
		},
		DisableKeepAlives: true,
	}}
	resp, err := client.Get("http://store/v1/" + question)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// logEnd returns the last event that the owner has recorded.
func (o *ageOwner) logEnd() (uint64, error) {
	var end struct {
		Sequence uint64 `json:"sequence"`
	}
	text, err := os.ReadFile(filepath.Join(o.m.dir, "end.json"))
	if err == nil {
		err = json.Unmarshal(text, &end)
	}
	return end.Sequence, err
}

// cpuOf returns the CPU time of a process in seconds.
func cpuOf(pid int) (float64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, err
	}
	// After the name, which may contain blanks, the 12th and 13th fields are in ticks.
	_, after, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(after)
	if len(fields) < 13 {
		return 0, fmt.Errorf("process %d: no CPU times in its stat", pid)
	}
	const ticks = 100 // per second, on every Linux
	sum := 0.0
	for _, f := range fields[11:13] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += float64(n) / ticks
	}
	return sum, nil
}

// jobVerb returns the command of one job of `bench jobs`, which runs until it is asked to end.
func (a *bench) jobVerb() *cobra.Command {
	return &cobra.Command{
		Use: jobCommand + " RUN", Hidden: true, Args: console.Args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, given []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			return a.open(c.Context(), func(s *store.Store) error {
				shared, _ := shm.Dir()
				err := launch.Run(c.Context(), launch.Config{
					Config: session.Config{
						Run: given[0], Trial: projections.DefaultTrial, Job: store.NewID(), Nodes: session.OneNode(1),
						NewID: store.NewID, Logger: slog.New(slog.DiscardHandler),
					},
					Resume: "none", Command: []string{self, "bench", jobRankCommand}, Stdout: a.Err, Stderr: a.Err,
				}, session.Store{
					ID: s.ID, Log: s.Log, Views: store.Queries{From: s.Views()}, Blobs: s.Blobs, Data: s.Data, Foreign: store.OpenForeign,
					Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) },
					Runtime:  s.Runtime, Shared: shared,
				})
				if c.Context().Err() != nil {
					return nil // it was asked to end
				}
				return err
			})
		},
	}
}

// jobRankVerb returns the command of its worker.
func (a *bench) jobRankVerb() *cobra.Command {
	return &cobra.Command{
		Use: jobRankCommand, Hidden: true, Args: console.Args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			ctx := c.Context()
			at, err := client.Connect(ctx)
			if err != nil {
				return err
			}
			defer at.Close()
			shape := tensor.Shape{1024}
			state := client.State{Tensors: []client.Tensor{{
				Shard: tensor.Shard{FQN: "model.weight", DType: tensor.Uint8, Global: shape, Box: shape.Full()}, Data: make([]byte, 1024),
			}}}
			tick := time.NewTicker(jobReports)
			defer tick.Stop()
			for step := int64(1); ; step++ {
				if err := at.Report(ctx, step, map[string]any{"loss": 1 / float64(step)}); err != nil {
					return err
				}
				if step%jobSaves == 1 {
					state.Tensors[0].Data[0]++
					if _, err := at.Save(ctx, step, state, client.SaveOptions{}); err != nil {
						return err
					}
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		},
	}
}
