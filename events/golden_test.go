package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write golden files that are missing, and docs/reference/events.md; existing golden files are never changed")

// samples holds one event of each kind with every field set.
var samples = []Body{
	StoreCreated{Store: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Format: 1, Data: "file:///srv/ckpts/data", Bucket: "s3://models/team?region=eu-central-1", Formerly: []string{"0192f0c1-0000-7000-8000-00000000000f"}},
	LogVoided{Sequence: 73, Digest: strings.Repeat("5f", 32), Why: "message on \"ckpt.gpt\": not of the form ckpt.<run>.<trial>.<actor>.<family>.<kind>"},
	AuditSealed{Size: 4711, Root: strings.Repeat("6a", 32), Rows: 3, Runs: strings.Repeat("7b", 32), Key: "example.org/log+94652ff6+AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB", Previous: "example.org/old\n4096\nampqampqampqampqampqampqampqampqampqampqamo=\n\n— example.org/old lGUv9gAA\n"},
	AccessGranted{User: "ada", Role: "operator", Hash: "8c9d0e1f20314253", Token: "laptop", Expires: "2026-12-24T12:00:00Z", By: "uid:1000@node-a", Key: "ada+94652ff6+AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB", Runs: []string{"bert*"}, Require: []string{"gpt"}},
	AccessRevoked{User: "ada", Hashes: []string{"8c9d0e1f20314253", "9d0e1f2031425364"}, By: "uid:1000@node-a", Keys: []string{"ada+94652ff6"}, Require: []string{"gpt"}},
	JobStarted{Job: "0192f0c1-0000-7000-8000-000000000001", Host: "node-a", PID: 4711, Command: []string{"python", "train.py", "--lr=3e-4"}, NProc: 2, NNodes: 1, Resume: "auto", Flags: []string{"--name=gpt.small", "--nproc=2"}, Dir: "/home/ada/gpt", Logs: "logs/gpt%2Esmall/0192f0c1-0000-7000-8000-000000000001", SlurmJob: "4711", SlurmRestarts: 2},
	NodeJoined{Job: "0192f0c1-0000-7000-8000-000000000001", Node: 1, Host: "node-b"},
	NodeLeft{Job: "0192f0c1-0000-7000-8000-000000000001", Node: 1, Reason: "nothing was received for 10s", Lost: true, Excluded: true, Host: "node-b", Boot: "0192f0c1-0000-7000-8000-0000000000b0", Term: "0192f0c1-0000-7000-8000-00000000007e"},
	NodeMeasured{Job: "0192f0c1-0000-7000-8000-000000000001", Node: 1, BytesPerSecond: 1_250_000_000, Partners: []int{0, 3}, Clock: clockOffset()},
	NodeSlow{Job: "0192f0c1-0000-7000-8000-000000000001", Attempt: 2, Node: 1, Over: true, By: "busy", Seconds: 0.5, Others: 0.25, Behind: 10, Of: 30},
	JobEnded{Job: "0192f0c1-0000-7000-8000-000000000001", ExitCode: 1, Reason: "retries exhausted", Term: "0192f0c1-0000-7000-8000-00000000007e"},
	GroupStarted{Attempt: 2, Job: "0192f0c1-0000-7000-8000-000000000001", WorldSize: 2, Ranks: []RankPlacement{
		{Rank: 0, Node: 0, LocalRank: 0, Devices: []string{"GPU-1b2c"}}, {Rank: 1, Node: 0, LocalRank: 1},
	}, Backend: "torch", Resume: "step-100.a1", PassedOver: []PassedOver{{Checkpoint: "step-200.a1", Reason: "r00001.safetensors: missing: the file is not there"}}, MorePassedOver: 3},
	GroupCoordinator{Attempt: 2, Job: "0192f0c1-0000-7000-8000-000000000001", Node: 1, Host: "node-b", Reason: "the coordinating node is silent"},
	NodeDevices{Attempt: 2, Ranks: []RankRun{{First: 8, Count: 2}}, Devices: [][]string{{"GPU-1b2c", "GPU-3d4e"}, {}}},
	TrainingStarted{Attempt: 2},
	WorkerExited{Attempt: 2, Rank: 1, Code: -9, Signal: "SIGKILL", Message: "killed", Traceback: "Traceback (most recent call last):\n  …", Unseen: true},
	GroupStopped{Attempt: 2, Reason: "rank 1 died", Failure: "worker", Term: "0192f0c1-0000-7000-8000-00000000007e"},
	TrialCreated{Config: map[string]any{"lr": 0.0003, "model": "gpt <small>"}, Parent: &TrialParent{Run: "base", Trial: "t0", Checkpoint: "step-100.a1"}},
	TrialStopRequested{Reason: "ckptstore preempt", Preempt: true, Job: "0192f0c1-0000-7000-8000-000000000001"},
	TrialPaused{Attempt: 2, Reason: "preempted"},
	TrialCompleted{Attempt: 2},
	TrialErrored{Attempt: 4, Message: "rank 1 died 4 times"},
	SearchBegun{
		Job: "0192f0c1-0000-7000-8000-000000000001", Metric: "loss", Mode: "min", Trials: 64, Seed: 7, Grace: 15, Reduction: 4, MaxSteps: 240, Finite: true, Space: map[string]any{"lr": map[string]any{"loguniform": []any{0.0001, 0.1}}, "model": "small"},
		Scheduler: "pbt", Every: 20, Quantile: 0.25, Resample: 0.125, Factors: []float64{1.2, 0.8}, Perturb: []string{"lr"},
	},
	SearchAssigned{
		Job: "0192f0c1-0000-7000-8000-000000000001", Trial: "t07", Rung: 1, Steps: 60, After: 4711, Reason: "loss 0.53 is number 2 of 12 on rung 0, of which the best 3 are trained further",
		Parent: &TrialParent{Run: "gpt.small", Trial: "t02", Checkpoint: "step-20.a1"}, Replaces: "t07", Config: map[string]any{"lr": 0.00012, "model": "small"},
	},
	Metrics{
		Attempt: 2, Iteration: 7, Step: 107, Metrics: map[string]any{"loss": 2.5, "grad_norm": "NaN", "lr": "-Infinity", "phase": "warm-up", "skipped": false},
		Others: []RankMetrics{{Rank: 1, Metrics: map[string]any{"loss": 2.75}}}, Seconds: 0.125,
		Summary: []MetricSummary{{Name: "loss", Ranks: 9999, NaNs: 1, Min: 2.25, MinOf: 7, Max: "Infinity", MaxOf: 1, Mean: 2.5}},
		Slowest: &SlowestRank{Rank: 1, Late: 0.000125},
	},
	LocalPlan{Attempt: 2, Checkpoint: "step-200.a2", Name: "step-200", Step: 200, Rank: 1, Participants: []int{0, 1}, Fingerprint: strings.Repeat("0a", 32), Plan: Blob{Inline: []byte{0, 1, 254, 255}, Size: 4}},
	GlobalPlan{Attempt: 2, Checkpoint: "step-200.a2", Layout: Blob{Digest: strings.Repeat("1b", 32), Size: 300_000}, Disagreements: []Disagreement{
		{FQN: "model.norm.weight", Offsets: []int64{0}, Sizes: []int64{8192}, Kept: 0, Ranks: []int{1, 3}}, {FQN: "config", Kept: 0, Ranks: []int{2}},
	}, MoreDisagreements: 7},
	LoadPlan{Attempt: 2, Load: 1, Checkpoint: "step-100.a1", Rank: 1, Reads: 12, Bytes: 4096},
	NodePlan{Attempt: 2, Checkpoint: "step-200.a2", Name: "step-200", Step: 200, Participants: []int{0, 1, 2, 3}, Ranks: []RankRun{{First: 2, Count: 2}}, Fingerprints: bytes.Repeat([]byte{10}, 64)},
	NodeSeal{Attempt: 2, Checkpoint: "step-200.a2", Ranks: []RankRun{{First: 2, Count: 2}, {First: 5, Count: 1}}, Bytes: []int64{1 << 31, 1 << 31, 1 << 30}, Waited: []float64{0.000025}, Copied: []float64{0.75, -1, 0.5}},
	NodeWrite{
		Attempt: 2, Checkpoint: "step-200.a2", Ranks: []RankRun{{First: 2, Count: 2}}, Files: []NodeFile{{Name: "r*.safetensors", Sizes: []int64{1 << 31, -1}}, {Name: "r*.idx", Sizes: []int64{8192}}},
		Indexes: bytes.Repeat([]byte{44}, 64), BytesWritten: []int64{1 << 30, 0}, BytesReused: []int64{1 << 30},
		Queued: []float64{0.25}, Digest: []float64{0.5, -1}, Write: []float64{1.5, 0.125}, Sync: []float64{0.0625},
	},
	ReplicaNode{Attempt: 2, Checkpoint: "step-200.a2", Ranks: []RankRun{{First: 2, Count: 2}}, Node: 3, Bytes: 1 << 32, Seconds: 1.5},
	WriteSealed{Attempt: 2, Checkpoint: "step-200.a2", Rank: 1, Bytes: 1 << 31, Waited: Seconds(25 * time.Microsecond), Copied: Seconds(750 * time.Millisecond)},
	WriteStarted{Attempt: 2, Checkpoint: "step-200.a2", Rank: 1, File: "r00001.safetensors", Upload: "2~VmFsaWRVcGxvYWRJRA", Token: "CJQ5ZKN2ETV7LX3OYRGWBHAM4D", PartSize: 32 << 20},
	WriteCompleted{Attempt: 2, Checkpoint: "step-200.a2", Rank: 1, Files: []File{{Name: "r00001.safetensors", Size: 1 << 31}, {Name: "r00001.idx", Size: 8192}}, IndexDigest: strings.Repeat("2c", 32), BytesWritten: 1 << 30, BytesReused: 1 << 30, Queued: Seconds(250 * time.Millisecond), Digest: Seconds(500 * time.Millisecond), Write: Seconds(1500 * time.Millisecond), Sync: Seconds(62_500 * time.Microsecond)},
	WriteFailed{Attempt: 2, Checkpoint: "step-200.a2", Rank: 1, Error: "no space left on device"},
	CheckpointBegun{Attempt: 2, Checkpoint: "step-200.a2", Name: "step-200", Step: 200, WorldSize: 2, Participants: []int{0, 1}, Bases: []CheckpointRef{{Run: "gpt.small", Trial: "main", Checkpoint: "step-100.a1"}, {Run: "base", Trial: "t0", Checkpoint: "step-100.a1"}}},
	CheckpointStaged{Attempt: 2, Checkpoint: "step-200.a2"},
	CheckpointCommitted{Attempt: 2, Checkpoint: "step-200.a2", Manifest: strings.Repeat("3d", 32), Bytes: 1 << 32, ManifestTook: Seconds(12 * time.Millisecond)},
	CheckpointAborted{Attempt: 2, Checkpoint: "step-200.a2", Reason: "deadline", Ranks: []int{1}},
	CheckpointSuperseded{Checkpoint: "step-200.a2", Reason: "resumed from step-100.a1"},
	CheckpointPinned{Checkpoint: "step-200.a2", Reason: "paper"},
	CheckpointUnpinned{Checkpoint: "step-200.a2"},
	CheckpointTagged{Checkpoint: "step-200.a2", Tag: "released"},
	CheckpointUntagged{Checkpoint: "step-200.a2", Tag: "released"},
	CheckpointAttached{Checkpoint: "step-200.a2", Name: "tokenizer.json", Digest: strings.Repeat("4e", 32), Size: 1234},
	CheckpointDeleted{Checkpoint: "step-200.a2", Reason: "retention"},
	RestoreBegun{Attempt: 3, Load: 1, Checkpoint: "step-100.a1", From: "base/t0", WorldSize: 2},
	RestoreCompleted{Attempt: 3, Load: 1, Checkpoint: "step-100.a1", Tier: "slots+peers+files", Bytes: 1 << 32, Slots: 1 << 30, Peers: 1 << 29, Passed: 1 << 28, Wanted: 1 << 31, Unread: []string{"optimizer.state"}, Resolve: Seconds(4 * time.Millisecond), Read: Seconds(2 * time.Second), Check: Seconds(250 * time.Millisecond)},
	RestoreFailed{Attempt: 3, Load: 1, Checkpoint: "step-100.a1", Error: "r00001.safetensors: block 7: checksum mismatch"},
	GPUUnhealthy{Node: 1, Device: "GPU-1b2c", Reason: "Xid 79"},
	GPURecovered{Node: 1, Device: "GPU-1b2c"},
}

func clockOffset() *float64 {
	behind := -0.75
	return &behind
}

// forms are events that mean something else without a member. Each has a golden file of its
// own; the name tells its form.
var forms = map[string]Body{
	"plan.local.v1-all":  LocalPlan{Attempt: 2, Checkpoint: "step-200.a2", Name: "step-200", Step: 200, Rank: 1, Fingerprint: strings.Repeat("0a", 32)},
	"plan.node.v1-same":  NodePlan{Attempt: 2, Checkpoint: "step-300.a2", Name: "step-300", Step: 300, Ranks: []RankRun{{First: 2, Count: 2}}, Digest: strings.Repeat("6a", 32)},
	"seal.node.v1-equal": NodeSeal{Attempt: 2, Checkpoint: "step-200.a2", Ranks: []RankRun{{First: 8, Count: 8}}, Bytes: []int64{1 << 31}},
	"group.started.v2": GroupStarted{
		Attempt: 2, Job: "0192f0c1-0000-7000-8000-000000000001", WorldSize: 10_004, Backend: "torch", Nodes: []NodeRun{{Node: 0, Nodes: 1250, First: 0, Count: 8}, {Node: 1250, Nodes: 1, First: 10_000, Count: 4}},
		Map: &Blob{Digest: strings.Repeat("1b", 32), Size: 300_000},
	},
	"checkpoint.begun.v1-all": CheckpointBegun{Attempt: 2, Checkpoint: "step-200.a2", Name: "step-200", Step: 200, WorldSize: 2},
	"write.completed.v1-from": WriteCompleted{
		Attempt: 2, Checkpoint: "step-200.a2", Rank: 1, IndexDigest: strings.Repeat("2c", 32), BytesWritten: 1 << 20, BytesReused: 1 << 31,
		Files: []File{{Name: "r00001.safetensors", Size: 1 << 20}, {Name: "r00001.safetensors", Size: 1 << 31, From: CheckpointRef{Run: "base", Trial: "t0", Checkpoint: "step-100.a1"}}, {Name: "r00001.idx", Size: 8192}},
	},
	"write.node.v1-from": NodeWrite{
		Attempt: 2, Checkpoint: "step-200.a2", Ranks: []RankRun{{First: 2, Count: 2}}, Indexes: bytes.Repeat([]byte{44}, 64), BytesWritten: []int64{1 << 20}, BytesReused: []int64{1 << 31},
		Files: []NodeFile{{Name: "r*.safetensors", Sizes: []int64{1 << 20}}, {Name: "r*.safetensors", Sizes: []int64{1 << 31}, From: CheckpointRef{Run: "base", Trial: "t0", Checkpoint: "step-100.a1"}}, {Name: "r*.idx", Sizes: []int64{8192}}},
	},
}

// scopeOf returns a scope that a kind is used with.
func scopeOf(k Kind) Scope {
	switch {
	case k == "store.created", k == "log.voided", k == "audit.sealed", k.Family() == "access":
		return Scope{Actor: Server}
	case k.Family() == "search":
		return Scope{Run: "gpt.small", Actor: Server}
	case k.Decides():
		return Scope{Run: "gpt.small", Trial: "main", Actor: Server}
	case k.Family() == "job":
		return Scope{Run: "gpt.small", Actor: Node(0)}
	case k.Family() == "gpu", k.Family() == "group", k.Family() == "node", strings.HasSuffix(string(k), ".node"):
		return Scope{Run: "gpt.small", Trial: "main", Actor: Node(1)}
	}
	return Scope{Run: "gpt.small", Trial: "main", Actor: Rank(1)}
}

func sampleEvent(t *testing.T, body Body) Event {
	t.Helper()
	stamp := Stamp{
		ID: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Source: "trainer/0192f0c1-0000-7000-8000-000000000001",
		Time: time.Date(2026, 3, 14, 15, 9, 26, 535_897_932, time.UTC),
	}
	scope := scopeOf(body.Kind())
	if body.Kind().Decides() {
		d, err := NewDecision(stamp, Aggregate{Run: scope.Run, Trial: scope.Trial}, body)
		if err != nil {
			t.Fatal(err)
		}
		return d.Event
	}
	f, err := NewFact(stamp, scope, body)
	if err != nil {
		t.Fatal(err)
	}
	return f.Event
}

// pretty returns a message in the form of the golden files.
func pretty(t *testing.T, m Message) []byte {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(m); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// grown counts how often members were added to a kind's version 1. The earlier golden
// files stay and must remain readable: see TestOldGolden.
var grown = map[Kind]int{
	"store.created": 2, "restore.begun": 1, "restore.completed": 4, "trial.stop_requested": 1, "group.stopped": 2, "group.worker_exited": 1, "job.started": 2, "group.started": 1, "job.ended": 1, "job.node_left": 3, "job.node_measured": 1, "report.metrics": 2,
	"access.granted": 1, "access.revoked": 1, "audit.sealed": 1, "checkpoint.begun": 1, "checkpoint.committed": 1, "write.sealed": 1, "write.completed": 1, "seal.node": 1, "write.node": 1, "search.begun": 2, "search.assigned": 1,
}

// goldenPath returns the newest golden file of a kind.
func goldenPath(k Kind) string {
	name := string(k) + ".v1"
	if n := grown[k]; n > 0 {
		name += fmt.Sprint("+", n)
	}
	return goldenFile(name)
}

func goldenFile(name string) string { return filepath.Join("testdata", "golden", name+".json") }

// Each kind has a golden file that equals today's output and decodes to the same event
// and body.
func TestGolden(t *testing.T) {
	seen := map[Kind]bool{}
	for _, body := range samples {
		k := body.Kind()
		t.Run(string(k), func(t *testing.T) {
			if seen[k] {
				t.Fatal("two samples of one kind")
			}
			seen[k] = true
			everyFieldSet(t, body)
			golden(t, goldenPath(k), body)
		})
	}
	for k := range kinds {
		if !seen[k] {
			t.Errorf("kind %s has no sample and no golden file", k)
		}
	}
}

// Each form has a golden file as well.
func TestGoldenForms(t *testing.T) {
	for name, body := range forms {
		t.Run(name, func(t *testing.T) { golden(t, goldenFile(name), body) })
	}
}

// golden compares an event of a body with its golden file, which it reads back.
func golden(t *testing.T, path string, body Body) {
	t.Helper()
	k, e := body.Kind(), sampleEvent(t, body)
	now := pretty(t, Encode(e))
	want, err := os.ReadFile(path)
	if os.IsNotExist(err) && *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, now, 0o644); err != nil {
			t.Fatal(err)
		}
		want, err = now, nil
	}
	if err != nil {
		t.Fatalf("%v; write it with -update", err)
	}
	if !bytes.Equal(now, want) {
		t.Errorf("events of this kind are written differently now; raise grown if members were added that may be left out, add a version otherwise:\n%s\nwant\n%s", now, want)
	}

	var m Message
	if err := json.Unmarshal(want, &m); err != nil {
		t.Fatal(err)
	}
	got, err := Decode(m)
	if err != nil {
		t.Fatal(err)
	}
	decoded, err := got.Body()
	if err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(decoded)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(again, e.Data) {
		t.Errorf("body is read as\n%s, want\n%s", again, e.Data)
	}
	if got.ID != e.ID || got.Kind != k || got.Version != e.Version || got.Scope != e.Scope || got.Source != e.Source || !got.Time.Equal(e.Time) {
		t.Errorf("envelope is read as %+v, want %+v", got, e)
	}
}

// Events written before members were added are still readable and keep their meaning.
func TestOldGolden(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "golden", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	of := map[Kind]int{}
	for _, file := range files {
		name, _, _ := strings.Cut(filepath.Base(file), ".v1")
		name, _, _ = strings.Cut(name, ".v2")
		k := Kind(name)
		if !k.Known() {
			t.Errorf("%s belongs to no kind", file)
			continue
		}
		of[k]++
		if file == goldenPath(k) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var m Message
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		e, err := Decode(m)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		body, err := e.Body()
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		var want bytes.Buffer
		if err := json.Compact(&want, e.Data); err != nil {
			t.Fatal(err)
		}
		if again, err := json.Marshal(body); err != nil || !bytes.Equal(again, want.Bytes()) {
			t.Errorf("%s is read as\n%s, want\n%s (%v)", file, again, want.Bytes(), err)
		}
	}
	for _, body := range forms {
		of[body.Kind()]--
	}
	for k, n := range of {
		if n != grown[k]+1 {
			t.Errorf("%s has %d golden files without those of its forms, want %d", k, n, grown[k]+1)
		}
	}
}

// everyFieldSet fails if a sample leaves a field of its body empty. Numbers of ranks
// and nodes may be 0.
func everyFieldSet(t *testing.T, body Body) {
	t.Helper()
	v := reflect.ValueOf(body)
	mayBeZero := []string{"Rank", "Node", "Code"}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if v.Field(i).IsZero() && !slices.Contains(mayBeZero, f.Name) && !setInForm(body.Kind(), i) {
			t.Errorf("the sample leaves field %s empty", f.Name)
		}
	}
}

// setInForm reports whether one of a kind's forms sets the i-th field.
func setInForm(k Kind, i int) bool {
	for _, body := range forms {
		if body.Kind() == k && !reflect.ValueOf(body).Field(i).IsZero() {
			return true
		}
	}
	return false
}

// A body that this program does not understand is passed on byte for byte.
func TestBodyIsKept(t *testing.T) {
	e := sampleEvent(t, TrainingStarted{Attempt: 1})
	e.Data = json.RawMessage("{ \"attempt\" :1,\n\t\"new\": [1e400, \"\\u00e4\", \"<&>\"], \"attempt\": 2 }")
	m := Encode(e)
	got, err := Decode(m)
	if err != nil {
		t.Fatal(err)
	}
	if again := Encode(got); string(again.Data) != string(m.Data) {
		t.Errorf("body came back as %q, want %q", again.Data, m.Data)
	}
	body, err := got.Body()
	if err != nil || *body.(*TrainingStarted) != (TrainingStarted{Attempt: 2}) {
		t.Errorf("body with an unknown field: %+v, %v", body, err)
	}
}

func TestBodyErrors(t *testing.T) {
	e := sampleEvent(t, TrainingStarted{Attempt: 1})
	for name, tc := range map[string]struct {
		change func(*Event)
		want   string
	}{
		"unknown kind":  {func(e *Event) { e.Kind = "group.levitated" }, `unknown kind "group.levitated"`},
		"newer version": {func(e *Event) { e.Version = 2 }, "version 2"},
	} {
		changed := e
		tc.change(&changed)
		got, err := Decode(Encode(changed)) // the envelope passes
		if err != nil {
			t.Errorf("%s: envelope: %v", name, err)
			continue
		}
		if _, err = got.Body(); !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), e.ID) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDecodeErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Message)
		want   string
	}{
		"no ID":            {func(m *Message) { delete(m.Header, HeaderID) }, HeaderID},
		"repeated ID":      {func(m *Message) { m.Header[HeaderID] = []string{"a", "b"} }, HeaderID},
		"other spelling":   {func(m *Message) { m.Header["Ce-Id"] = m.Header[HeaderID]; delete(m.Header, HeaderID) }, HeaderID},
		"no type":          {func(m *Message) { delete(m.Header, HeaderType) }, HeaderType},
		"other type":       {func(m *Message) { m.Header[HeaderType] = []string{"ckpt.group.stopped.v1"} }, "contradicts"},
		"version 0":        {func(m *Message) { m.Header[HeaderType][0] = "ckpt.group.training_started.v0" }, "no version"},
		"version of words": {func(m *Message) { m.Header[HeaderType][0] = "ckpt.group.training_started.vx" }, "no version"},
		"no time":          {func(m *Message) { delete(m.Header, HeaderTime) }, HeaderTime},
		"bad time":         {func(m *Message) { m.Header[HeaderTime] = []string{"yesterday"} }, HeaderTime},
		"other envelope":   {func(m *Message) { m.Header[HeaderSpec] = []string{"2.0"} }, "want 1.0"},
		"other content":    {func(m *Message) { m.Header[HeaderContentType] = []string{"text/plain"} }, "want application/json"},
		"no JSON":          {func(m *Message) { m.Data = json.RawMessage(`{"attempt":`) }, "not JSON"},
		"no body":          {func(m *Message) { m.Data = nil }, "not JSON"},
		"other subject":    {func(m *Message) { m.Subject = "ckpt.hello" }, "ckpt.hello"},
	} {
		m := Encode(sampleEvent(t, TrainingStarted{Attempt: 1}))
		tc.change(&m)
		if _, err := Decode(m); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFactsAndDecisionsDiffer(t *testing.T) {
	stamp := Stamp{ID: "x", Time: time.Unix(1, 0)}
	rank := Scope{Run: "r", Trial: "t", Actor: Rank(0)}
	if _, err := NewFact(stamp, rank, CheckpointCommitted{}); err == nil {
		t.Error("a decision was made a fact")
	}
	if _, err := NewFact(stamp, Scope{Run: "r", Trial: "t", Actor: Server}, TrainingStarted{}); err == nil {
		t.Error("a fact got into the lane of decisions")
	}
	if _, err := NewDecision(stamp, Aggregate{Run: "r"}, TrainingStarted{}); err == nil {
		t.Error("a fact was made a decision")
	}
	for _, bad := range []Stamp{{Time: stamp.Time}, {ID: "x"}} {
		if _, err := NewFact(bad, rank, TrainingStarted{}); err == nil {
			t.Errorf("stamp %+v was accepted", bad)
		}
	}
	if _, err := NewFact(stamp, rank, Metrics{Metrics: map[string]any{"f": func() {}}}); err == nil {
		t.Error("a body that is no JSON was accepted")
	}
}

func TestRecordedJSON(t *testing.T) {
	e := sampleEvent(t, TrialCompleted{Attempt: 2})
	data, err := json.Marshal(Recorded{Event: e, Sequence: 42, Stored: e.Time.Add(time.Second).In(time.FixedZone("x", 3600))})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"sequence":42,"stored":"2026-03-14T15:09:27.535897932Z","specversion":"1.0","id":"0192f0c1-2a3b-7c4d-8e5f-60718293a4b5",` +
		`"type":"ckpt.trial.completed.v1","source":"trainer/0192f0c1-0000-7000-8000-000000000001","time":"2026-03-14T15:09:26.535897932Z",` +
		`"subject":"ckpt.gpt%2Esmall.main.s.trial.completed","datacontenttype":"application/json","data":{"attempt":2}}`
	if string(data) != want {
		t.Errorf("got\n%s, want\n%s", data, want)
	}
	var back Recorded
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(back)
	if err != nil || !bytes.Equal(again, data) || back.Scope != e.Scope || back.Kind != e.Kind || back.Version != 1 {
		t.Errorf("read back as %+v, %v", back, err)
	}
	for old, bad := range map[string]string{
		`"sequence":42`: `"sequence":0`, `completed.v1`: `completed.v0`, `"type":"ckpt.trial`: `"type":"ckpt.trail`,
		`.main.s.`: `.main.z.`, `,"data":{"attempt":2}`: ``, `"time":"2026`: `"time":"year`,
	} {
		if err := json.Unmarshal([]byte(strings.Replace(want, old, bad, 1)), new(Recorded)); err == nil {
			t.Errorf("%s instead of %s is accepted", bad, old)
		}
	}
}
