package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/gpu"
)

// groupOf is a group of workers with the devices that are listed by worker,
// separated by commas, all on one node.
func groupOf(devices ...string) *Group {
	var workers []gpu.Worker
	for _, list := range devices {
		w := gpu.Worker{Node: "n1"}
		if list != "" {
			w.Devices = strings.Split(list, ",")
		}
		workers = append(workers, w)
	}
	return &Group{Attempt: 1, Workers: Arrange(workers)}
}

// visible is each worker's CUDA_VISIBLE_DEVICES, "-" where it has none.
func visible(g *Group) (out []string) {
	for _, w := range g.Workers {
		value, ok := w.Env["CUDA_VISIBLE_DEVICES"]
		if !ok {
			value = "-"
		}
		out = append(out, value)
	}
	return out
}

// shares is a backend whose workers see each other's devices.
type shares struct{ Default }

// ShareVisibleDevices implements Backend.
func (shares) ShareVisibleDevices() bool { return true }

func Test02DefaultHooksDoNothing(t *testing.T) {
	g := groupOf("", "")
	e := NewExecutor("default", Default{}, Options{})
	if err := errors.Join(e.Start(t.Context(), g), e.TrainingStart(t.Context())); err != nil {
		t.Fatal(err)
	}
	for _, w := range g.Workers {
		if len(w.Env) > 0 {
			t.Errorf("rank %d is given %v", w.Rank, w.Env)
		}
	}
	data := map[string]any{"loss": 1.5}
	if got, err := e.Fetch(data); err != nil || !reflect.DeepEqual(got, map[string]any{"loss": 1.5}) {
		t.Errorf("fetched %v, %v", got, err)
	}
	if holds, err := e.HoldsHello(); holds || err != nil {
		t.Errorf("hellos are held for a hook that does nothing: %v, %v", holds, err)
	}
	e.Shutdown(t.Context())
}

func Test02SharingDefaultsToFalseAndTheEnvironmentWins(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		backend Backend
		flag    *bool
		env     string
		want    string // what worker 0 sees
	}{
		{Default{}, nil, "", "GPU-a"},
		{shares{}, nil, "", "GPU-a,GPU-b"},
		{Default{}, &yes, "", "GPU-a,GPU-b"},
		{shares{}, &no, "", "GPU-a"},
		{Default{}, nil, "1", "GPU-a,GPU-b"},
		{Default{}, &no, "true", "GPU-a,GPU-b"},
		{shares{}, nil, "0", "GPU-a"},
		{shares{}, &yes, "false", "GPU-a"},
	} {
		asked, err := Sharing(c.flag, c.env)
		if err != nil {
			t.Fatal(err)
		}
		g := groupOf("GPU-a", "GPU-b")
		if err := NewExecutor("test", c.backend, Options{Share: asked}).Start(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		if got := visible(g)[0]; got != c.want {
			t.Errorf("%+v: worker 0 sees %q", c, got)
		}
	}
	if _, err := Sharing(nil, "maybe"); err == nil || !strings.Contains(err.Error(), `CKPTSTORE_SHARE_DEVICES is "maybe"; set it to 1 or to 0`) {
		t.Errorf("error %v", err)
	}
}

func Test06UnionOfANode(t *testing.T) {
	g := &Group{Workers: Arrange([]gpu.Worker{
		{Node: "N1", Devices: []string{"0", "1"}}, {Node: "N1", Devices: []string{"2", "3"}}, {Node: "N2", Devices: []string{"0", "1"}},
	})}
	if err := g.show(true, true); err != nil {
		t.Fatal(err)
	}
	if got, want := visible(g), []string{"0,1,2,3", "0,1,2,3", "0,1"}; !slices.Equal(got, want) {
		t.Errorf("workers see %q, want %q", got, want)
	}
	for _, w := range g.Workers {
		if w.Env["CUDA_DEVICE_ORDER"] != "PCI_BUS_ID" {
			t.Errorf("rank %d: CUDA counts by %q", w.Rank, w.Env["CUDA_DEVICE_ORDER"])
		}
	}
	// Without GPUs for the workers the environment is left as it is.
	none := groupOf("", "")
	if err := none.show(true, true); err != nil || len(none.Workers[0].Env) > 0 {
		t.Errorf("%v, %v", none.Workers[0].Env, err)
	}
	// An existing CUDA_DEVICE_ORDER is kept.
	said := groupOf("0", "1")
	if err := said.show(true, false); err != nil || said.Workers[0].Env["CUDA_DEVICE_ORDER"] != "" {
		t.Errorf("%v, %v", said.Workers[0].Env, err)
	}
	// A CUDA process sees one MIG instance.
	if err := groupOf("MIG-a", "MIG-b").show(true, true); err == nil || !strings.Contains(err.Error(), "do not share devices here") {
		t.Errorf("MIG instances: error %v", err)
	}
	own := groupOf("MIG-a", "MIG-b")
	if err := own.show(false, true); err != nil || !slices.Equal(visible(own), []string{"MIG-a", "MIG-b"}) {
		t.Errorf("%q, %v", visible(own), err)
	}
}

func Test07NumbersByValueAndNamesByText(t *testing.T) {
	for _, c := range []struct{ devices, want string }{
		{"10,2", "2,10"}, {"GPU-b10,GPU-b2", "GPU-b10,GPU-b2"}, {"11,9,10,1", "1,9,10,11"},
	} {
		g := groupOf(c.devices)
		if err := g.show(true, true); err != nil || visible(g)[0] != c.want {
			t.Errorf("%s: %q, %v, want %q", c.devices, visible(g)[0], err, c.want)
		}
	}
}

func Test08Ranks(t *testing.T) {
	on := func(hosts string) (workers []gpu.Worker) {
		for _, host := range hosts {
			workers = append(workers, gpu.Worker{Node: string(host)})
		}
		return workers
	}
	of := func(workers []gpu.Worker, what func(Position) int) (out []int) {
		for _, p := range Positions(workers) {
			out = append(out, what(p))
		}
		return out
	}
	for name, c := range map[string]struct {
		what func(Position) int
		want []int
	}{
		"rank":       {func(p Position) int { return p.Rank }, []int{0, 1, 3, 2, 4}},
		"local rank": {func(p Position) int { return p.LocalRank }, []int{0, 1, 0, 2, 1}},
		"node rank":  {func(p Position) int { return p.NodeRank }, []int{0, 0, 1, 0, 1}},
		"local size": {func(p Position) int { return p.LocalSize }, []int{3, 3, 2, 3, 2}},
	} {
		if got := of(on("aabab"), c.what); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	devices := []gpu.Worker{
		{Node: "b", Devices: []string{"10"}},
		{Node: "a", Devices: []string{"3", "1"}},
		{Node: "b"},
		{Node: "b", Devices: []string{"9", "2"}},
		{Node: "a", Devices: []string{"0"}},
	}
	if got, want := of(devices, func(p Position) int { return p.Rank }), []int{1, 4, 2, 0, 3}; !slices.Equal(got, want) {
		t.Errorf("ranks by the lowest device: %v, want %v", got, want)
	}
}

// For any workers: ranks are a permutation, a node's ranks are contiguous, nodes
// come in the order of first occurrence, local ranks count them, and devices
// ascend.
func Test08RanksOfAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		workers := rapid.SliceOf(rapid.Custom(func(t *rapid.T) gpu.Worker {
			return gpu.Worker{
				Node:    rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node"),
				Devices: rapid.SliceOfN(rapid.SampledFrom([]string{"0", "2", "10", "GPU-1", "GPU-0"}), 0, 2).Draw(t, "devices"),
			}
		})).Draw(t, "workers")
		positions := Positions(workers)
		var seen []string
		sizes := map[string]int{}
		byRank := make([]int, len(workers))
		for i, w := range workers {
			if sizes[w.Node]++; sizes[w.Node] == 1 {
				seen = append(seen, w.Node)
			}
			byRank[positions[i].Rank] = i
		}
		local := 0
		for rank, i := range byRank {
			p, w := positions[i], workers[i]
			if rank == 0 || workers[byRank[rank-1]].Node != w.Node {
				local = 0
			}
			want := Position{rank, local, sizes[w.Node], slices.Index(seen, w.Node), len(seen)}
			if p != want {
				t.Fatalf("worker %d of %+v is %+v, want %+v", i, workers, p, want)
			}
			if local > 0 {
				if before := workers[byRank[rank-1]]; lowestOf(before) > lowestOf(w) {
					t.Fatalf("rank %d has %q and the next one %q", rank-1, before.Devices, w.Devices)
				}
			}
			local++
		}
	})
}

// lowestOf is a text that sorts as the lowest device of a worker does.
func lowestOf(w gpu.Worker) string {
	if len(w.Devices) == 0 {
		return "~"
	}
	ids := slices.Clone(w.Devices)
	gpu.SortIDs(ids)
	if strings.HasPrefix(ids[0], "GPU-") {
		return ids[0]
	}
	return fmt.Sprintf("%4s", ids[0])
}

// encodes sends metrics under other names.
type encodes struct{ Default }

// EncodeData implements Backend.
func (encodes) EncodeData(data map[string]any) (map[string]any, error) {
	out := map[string]any{}
	for k, v := range data {
		out["x-"+k] = v
	}
	return out, nil
}

// DecodeData implements Backend.
func (encodes) DecodeData(data map[string]any) (map[string]any, error) {
	out := map[string]any{}
	for k, v := range data {
		name, ok := strings.CutPrefix(k, "x-")
		if !ok {
			return nil, fmt.Errorf("metric %q was not encoded", k)
		}
		out[name] = v
	}
	return out, nil
}

func Test09EncodeAndDecode(t *testing.T) {
	for _, b := range []Backend{Default{}, encodes{}} {
		e := NewExecutor("test", b, Options{})
		if err := e.Start(t.Context(), groupOf("")); err != nil {
			t.Fatal(err)
		}
		rapid.Check(t, func(t *rapid.T) {
			data := rapid.MapOf(rapid.String(), rapid.Custom(func(t *rapid.T) any { return rapid.Float64().Draw(t, "value") })).Draw(t, "data")
			encoded, err := b.EncodeData(data)
			if err != nil {
				t.Fatal(err)
			}
			got, err := e.Fetch(encoded)
			same := func(a, b any) bool { return cmp.Compare(a.(float64), b.(float64)) == 0 }
			if err != nil || len(got) != len(data) {
				t.Fatalf("%v came as %v, %v", data, got, err)
			}
			for k, v := range data {
				if !same(got[k], v) {
					t.Fatalf("%q: %v came as %v", k, v, got[k])
				}
			}
		})
	}
	e := NewExecutor("test", encodes{}, Options{})
	if err := e.Start(t.Context(), groupOf("")); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Fetch(map[string]any{"loss": 1.0}); err == nil || !strings.Contains(err.Error(), `backend test: decode a report: metric "loss" was not encoded`) {
		t.Errorf("error %v", err)
	}
}

func Test11OneSessionAtATimeAndNoFetchBefore(t *testing.T) {
	e := NewExecutor("test", Default{}, Options{})
	fetch := func() error {
		_, err := e.Fetch(nil)
		return err
	}
	if err := fetch(); !errors.Is(err, ErrNoSession) {
		t.Errorf("fetch before the start: %v", err)
	}
	if err := e.TrainingStart(t.Context()); !errors.Is(err, ErrNoSession) {
		t.Errorf("training before the start: %v", err)
	}
	if err := e.Start(t.Context(), groupOf("")); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), groupOf("")); !errors.Is(err, ErrLive) || !strings.Contains(err.Error(), "attempt 1 has not ended") {
		t.Errorf("a second start: %v", err)
	}
	if err := errors.Join(fetch(), e.TrainingStart(t.Context())); err != nil {
		t.Errorf("after the start: %v", err)
	}
	if err := e.TrainingStart(t.Context()); err == nil || !strings.Contains(err.Error(), "has started already") {
		t.Errorf("training twice: %v", err)
	}
	for _, end := range []func(){func() { e.Shutdown(t.Context()) }, e.Abort} {
		end()
		if err := fetch(); err != nil {
			t.Errorf("a last report: %v", err)
		}
		e.End()
		e.End()
		if err := fetch(); !errors.Is(err, ErrNoSession) {
			t.Errorf("fetch after the end: %v", err)
		}
		if err := e.Start(t.Context(), groupOf("")); err != nil {
			t.Errorf("the next start: %v", err)
		}
	}
	e.End()

	// A start that fails leaves no session, nor is there one before it is over.
	var during error
	refuses := NewExecutor("test", Default{}, Options{Init: func(context.Context, *Group) error {
		_, during = e.Fetch(nil)
		return errors.New("not here")
	}})
	if err := refuses.Start(t.Context(), groupOf("")); err == nil || !strings.Contains(err.Error(), "backend test: init hook: not here") {
		t.Errorf("error %v", err)
	}
	if _, err := refuses.Fetch(nil); !errors.Is(err, ErrNoSession) || !errors.Is(during, ErrNoSession) {
		t.Errorf("fetch after a start that failed: %v, during it: %v", err, during)
	}
}
