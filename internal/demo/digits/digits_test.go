package digits

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestTrainingIsAccurate(t *testing.T) {
	g := newGroup(4, 42)
	losses := g.train(t, 240)
	if first, last := losses[0], losses[239]; last > first/5 {
		t.Errorf("loss went from %.3f to %.3f", first, last)
	}
	if accuracy := g.accuracy(t); accuracy < 0.95 {
		t.Errorf("accuracy %.4f after 240 steps, want 0.95", accuracy)
	}
}

func TestRunsAreBitwiseEqual(t *testing.T) {
	for _, world := range []int{1, 3, 4} {
		a, b := newGroup(world, 5), newGroup(world, 5)
		if !slices.Equal(a.train(t, 20), b.train(t, 20)) {
			t.Errorf("world %d: losses differ", world)
		}
		if a.digest(t) != b.digest(t) {
			t.Errorf("world %d: digests differ", world)
		}
		if c := newGroup(world, 6); c.digest(t) == newGroup(world, 5).digest(t) {
			t.Errorf("world %d: another seed gives the same model", world)
		}
	}
}

func TestInitialWeightsDoNotDependOnWorld(t *testing.T) {
	want := newGroup(1, 9).digest(t)
	for _, world := range []int{2, 3, 4, 7, 11, 50} {
		if got := newGroup(world, 9).digest(t); got != want {
			t.Errorf("world %d: digest %s, world 1 has %s", world, got, want)
		}
	}
}

func TestLoadIntoAnotherWorld(t *testing.T) {
	from := newGroup(4, 3)
	from.train(t, 12)
	want, accuracy := from.digest(t), from.accuracy(t)
	for _, world := range []int{1, 2, 3, 5, 8, 12} {
		to := newGroup(world, 77)
		to.load(t, from)
		if got := to.digest(t); got != want {
			t.Errorf("world %d: digest %s, want %s", world, got, want)
		}
		if to.accuracy(t) != accuracy || to.models[0].Iteration() != 12 {
			t.Errorf("world %d: accuracy or iteration changed", world)
		}
		to.train(t, 1)
	}
}

func TestResumeNeedsTheRandomState(t *testing.T) {
	whole := newGroup(3, 4)
	whole.train(t, 10)
	stopped := newGroup(3, 4)
	stopped.train(t, 6)

	resumed, forgetful := newGroup(3, 99), newGroup(3, 99)
	resumed.load(t, stopped)
	forgetful.load(t, stopped)
	for rank, m := range resumed.models {
		if err := m.SetRNG(stopped.models[rank].RNG()); err != nil {
			t.Fatal(err)
		}
	}
	resumed.train(t, 4)
	forgetful.train(t, 4)
	if resumed.digest(t) != whole.digest(t) {
		t.Error("a resumed run ends with other bits than one never stopped")
	}
	if forgetful.digest(t) == whole.digest(t) {
		t.Error("the random state makes no difference")
	}
}

func TestSetRNGRefusesDamage(t *testing.T) {
	m := New(0, 1, 1)
	before := m.RNG()
	for _, state := range [][]byte{nil, []byte("pcg:"), append([]byte("xxx:"), before[4:]...), append(before, 0)} {
		if err := m.SetRNG(state); err == nil {
			t.Errorf("state of %d bytes accepted", len(state))
		}
	}
	if !bytes.Equal(before[:20], m.RNG()) {
		t.Error("a refused state changed the generator")
	}
}

func TestTensors(t *testing.T) {
	boxes := func(world int, fqn string) string {
		var all []string
		for rank := range world {
			for _, s := range New(rank, world, 1).Tensors() {
				if err := s.Validate(); err != nil {
					t.Fatal(err)
				}
				if int64(len(s.Data)) != s.Bytes() {
					t.Fatalf("%s has %d bytes, its box needs %d", s.FQN, len(s.Data), s.Bytes())
				}
				if s.FQN == fqn {
					all = append(all, s.Box.String())
				}
			}
		}
		return strings.Join(all, " ")
	}
	for _, c := range []struct {
		world int
		fqn   string
		want  string
	}{
		{1, "model.layer2.weight", "[0 0]+[10 48]"},
		{4, "model.layer2.weight", "[0 0]+[3 48] [3 0]+[3 48] [6 0]+[3 48] [9 0]+[1 48]"},
		{6, "optim.exp_avg.model.layer2.weight", "[0 0]+[2 48] [2 0]+[2 48] [4 0]+[2 48] [6 0]+[2 48] [8 0]+[2 48] [10 0]+[0 48]"},
		{2, "model.layer1.bias", "[0]+[24] [24]+[24]"},
		{2, "optim.exp_avg_sq.model.layer1.weight", "[0 0]+[24 64] [24 0]+[24 64]"},
		{2, "model.layer2.bias", "[0]+[10] [0]+[10]"},
		{2, "optim.step", "[]+[] []+[]"},
	} {
		if got := boxes(c.world, c.fqn); got != c.want {
			t.Errorf("world %d: %s: boxes %s, want %s", c.world, c.fqn, got, c.want)
		}
	}
	if n := len(New(0, 1, 1).Tensors()); n != 13 {
		t.Errorf("%d tensors, want 13", n)
	}
}

func TestTensorsAreLiveMemory(t *testing.T) {
	m := New(1, 2, 1)
	for _, s := range m.Tensors() {
		for i := range s.Data {
			s.Data[i] = 0
		}
		if s.FQN == "optim.step" {
			s.Data[0] = 17
		}
	}
	if m.Iteration() != 17 {
		t.Errorf("iteration %d, want 17", m.Iteration())
	}
	for _, p := range m.params {
		if len(p.value) > 0 && slices.Max(p.value) != 0 {
			t.Errorf("%s did not follow a write to its chunk", p.name)
		}
	}
}

func TestRanksOutOfStepAreNamed(t *testing.T) {
	g := newGroup(3, 1)
	g.models[2].step[0] = 40
	err := g.try(t, func(ctx context.Context, m *Model, x Exchange) error {
		_, err := m.Step(ctx, x)
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "40") {
		t.Errorf("error %v does not name the step", err)
	}

	g = newGroup(2, 1)
	g.models[1].params[3].value[0]++
	err = g.try(t, func(ctx context.Context, m *Model, x Exchange) error {
		_, err := m.Digest(ctx, x)
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "ranks 0 and 1 have different copies of model.layer2.bias") {
		t.Errorf("replicas that differ: error %v", err)
	}

	g = newGroup(2, 1)
	err = g.try(t, func(ctx context.Context, m *Model, x Exchange) (err error) {
		if m.rank == 0 {
			_, err = m.Digest(ctx, x)
		} else {
			_, err = m.Step(ctx, x)
		}
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "another kind of message") {
		t.Errorf("ranks that call different methods: error %v", err)
	}
}

func TestExchangeAnswersAreChecked(t *testing.T) {
	for name, answer := range map[string][][]byte{
		"no ranks":  nil,
		"empty":     {nil},
		"truncated": {New(0, 1, 1).header(kindParameters, 0)},
	} {
		x := ExchangeFunc(func(context.Context, []byte) ([][]byte, error) { return answer, nil })
		if _, err := New(0, 1, 1).Step(t.Context(), x); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestStepEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := New(0, 2, 1).Step(ctx, newMeeting(2).of(0)); err == nil {
		t.Error("a rank alone took a step")
	}
}

func TestNewRefusesBadRanks(t *testing.T) {
	for _, c := range [][2]int{{-1, 2}, {2, 2}, {0, 0}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			New(c[0], c[1], 1)
		})
	}
}

func BenchmarkStep(b *testing.B) {
	x := ExchangeFunc(func(_ context.Context, own []byte) ([][]byte, error) { return [][]byte{own}, nil })
	m := New(0, 1, 1)
	for b.Loop() {
		if _, err := m.Step(b.Context(), x); err != nil {
			b.Fatal(err)
		}
	}
}
