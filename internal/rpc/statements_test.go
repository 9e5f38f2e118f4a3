package rpc

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
)

type fakeOptions struct{ n int }

// fake is a backend that opens nothing.
func fake() Handlers {
	return Handlers{
		Construct: func(Settings) (Options, []string, error) { return &fakeOptions{}, nil, nil },
		Owns:      owns[*fakeOptions],
		Init:      func(context.Context, Setup) (Agent, error) { return nil, errors.New("the fake was asked") },
	}
}

func Test25Registering(t *testing.T) {
	r := Builtin()
	b, err := r.Register("FAKE", fake())
	if err != nil || b.Name() != "FAKE" {
		t.Fatalf("%q, %v", b.Name(), err)
	}
	_, err = r.Register("FAKE", fake())
	wantError(t, err, "FAKE", "already registered")
	_, err = r.Register(TensorPipe, fake())
	wantError(t, err, "already registered")
	if !r.Registered("FAKE") || !r.Registered(ProcessGroup) || r.Registered("unknown") {
		t.Error("Registered is wrong")
	}
	_, err = r.Lookup("unknown")
	wantError(t, err, `"unknown"`, "FAKE", ProcessGroup, TensorPipe)
	if _, err := r.Register("HALF", Handlers{Owns: owns[*fakeOptions]}); err == nil || r.Registered("HALF") {
		t.Errorf("half a backend was registered: %v", err)
	}
	if Builtin().Registered("FAKE") {
		t.Error("a registration is seen by another registry")
	}
}

func Test26HandlesStayValidAndEqual(t *testing.T) {
	r := Builtin()
	before, err := r.Lookup(TensorPipe)
	if err != nil {
		t.Fatal(err)
	}
	registered, err := r.Register("FAKE", fake())
	if err != nil {
		t.Fatal(err)
	}
	after, err := r.Lookup(TensorPipe)
	if err != nil || before != after {
		t.Errorf("%v and %v differ, %v", before, after, err)
	}
	if found, err := r.Lookup("FAKE"); err != nil || found != registered {
		t.Errorf("%v and %v differ, %v", found, registered, err)
	}
	if o, err := r.Construct(before, nil, slog.New(slog.DiscardHandler)); err != nil || !owns[*TensorPipeOptions](o) {
		t.Errorf("%v, %v", o, err)
	}
}

func Test27Defaults(t *testing.T) {
	said := &bytes.Buffer{}
	log := slog.New(slog.NewTextHandler(said, nil))
	r := Builtin()
	group, _ := r.Lookup(ProcessGroup)
	pipe, _ := r.Lookup(TensorPipe)
	o, err := r.Construct(group, nil, log)
	if g, ok := o.(*ProcessGroupOptions); err != nil || !ok || g.Timeout != time.Minute || g.InitMethod != "env://" || g.SendRecvThreads != 4 {
		t.Errorf("%+v, %v", o, err)
	}
	o, err = r.Construct(pipe, Settings{SettingTimeout: -1}, log)
	if p, ok := o.(*TensorPipeOptions); err != nil || !ok || p.Timeout != time.Minute || p.InitMethod != "env://" || p.WorkerThreads != 16 {
		t.Errorf("%+v, %v", o, err)
	}
	if UnsetTimeout != -1 || said.Len() > 0 {
		t.Errorf("unset %d, warned %q", UnsetTimeout, said)
	}
	o, err = r.Construct(pipe, Settings{SettingTimeout: 1.5, SettingWorkerThreads: 3, "colour": "red", SettingSendRecvThreads: 1}, log)
	if p := o.(*TensorPipeOptions); err != nil || p.Timeout != 1500*time.Millisecond || p.WorkerThreads != 3 {
		t.Errorf("%+v, %v", o, err)
	}
	for _, name := range []string{"colour", SettingSendRecvThreads} {
		if !strings.Contains(said.String(), "level=WARN") || !strings.Contains(said.String(), "option="+name) {
			t.Errorf("%q is not warned of in %q", name, said)
		}
	}
	for _, s := range []Settings{
		{SettingTimeout: "soon"},
		{SettingWorkerThreads: "many"},
		{SettingInitMethod: 7},
	} {
		_, err := r.Construct(pipe, s, log)
		if wrong := (*TypeError)(nil); !errors.As(err, &wrong) {
			t.Errorf("%v: error %v, want a TypeError", s, err)
		}
	}
	for _, s := range []Settings{{SettingTimeout: -2}, {SettingWorkerThreads: -1}, {SettingChannels: 1000}, {SettingMaxBytes: -1}} {
		if _, err := r.Construct(pipe, s, log); err == nil {
			t.Errorf("%v was taken", s)
		}
	}
}

func Test28InitChecksTypesAndRanks(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		for _, c := range []struct {
			name   string
			change func(*Setup)
			types  bool
			part   string
		}{
			{"store", func(s *Setup) { s.Store = "a store" }, true, "store must be a "},
			{"no store", func(s *Setup) { s.Store = nil }, true, "store must be a "},
			{"options", func(s *Setup) { s.Options = &fakeOptions{} }, true, "options must be those of " + backend},
			{"rank", func(s *Setup) { s.Rank = 1 }, false, "rank 1 is not the group's rank 0"},
			{"world", func(s *Setup) { s.World = 2 }, false, "world size 2 is not the group's size 1"},
		} {
			_, errs := world(t, backend, 1, func(_ int, s *Setup) { c.change(s) })
			wantError(t, errs[0], c.part)
			if wrong := (*TypeError)(nil); errors.As(errs[0], &wrong) != c.types {
				t.Errorf("%s: %T %v", c.name, errs[0], errs[0])
			}
		}
		open(t, backend, 1, func(_ int, s *Setup) { s.Rank, s.World = 0, 1 })
		agents := open(t, backend, 2, func(_ int, s *Setup) { s.Rank, s.World = -1, -1 })
		if agents[1].Self() != (Peer{"worker1", 1}) {
			t.Errorf("agent is %v", agents[1].Self())
		}
	})
}

func Test29BackendIsInferred(t *testing.T) {
	none := Backend{}
	infer := func(o Options, store any) (Agent, error) {
		agents, errs := world(t, TensorPipe, 1, func(_ int, s *Setup) {
			s.Backend, s.Options = none, o
			if store != nil {
				s.Store = store
			}
		})
		return agents[0], errs[0]
	}
	a, err := infer(nil, nil)
	if _, ok := a.(*Pipe); !ok || err != nil {
		t.Errorf("by default %T, %v, want TENSORPIPE", a, err)
	}
	a, err = infer(DefaultTensorPipe(), nil)
	if _, ok := a.(*Pipe); !ok || err != nil {
		t.Errorf("of its options %T, %v, want TENSORPIPE", a, err)
	}
	a, err = infer(DefaultProcessGroup(), NewSwitch(1).Messenger(0))
	if _, ok := a.(*groupAgent); !ok || err != nil {
		t.Errorf("of its options %T, %v, want PROCESS_GROUP", a, err)
	}
	_, err = infer(&fakeOptions{}, nil)
	wantError(t, err, "*rpc.fakeOptions", "name the backend")

	r := Builtin()
	if _, err := r.Register("FAKE", fake()); err != nil {
		t.Fatal(err)
	}
	_, err = r.Init(t.Context(), Setup{Options: &fakeOptions{1}, Name: "a", Rank: AnyRank, World: AnyRank})
	wantError(t, err, "the fake was asked")
	if _, err := r.Register("TWIN", fake()); err != nil {
		t.Fatal(err)
	}
	_, err = r.Init(t.Context(), Setup{Options: &fakeOptions{1}, Name: "a", Rank: AnyRank, World: AnyRank})
	wantError(t, err, "several", "FAKE", "TWIN")
}

func Test30DeviceMaps(t *testing.T) {
	for _, c := range []struct {
		name string
		maps map[string]DeviceMap
		want string // part of the error; empty for none
	}{
		{"none", nil, ""},
		{"one to one", map[string]DeviceMap{"worker1": {{0, 1}, {1, 0}}}, ""},
		{"to itself", map[string]DeviceMap{"worker0": {{0, 1}}}, ""},
		{"duplicate", map[string]DeviceMap{"worker1": {{0, 1}, {0, 1}}}, "device 0 stands twice"},
		{"one to many", map[string]DeviceMap{"worker1": {{0, 1}, {0, 0}}}, "device 0 stands twice"},
		{"many to one", map[string]DeviceMap{"worker1": {{0, 1}, {1, 1}}}, "devices 0 and 1 both go to device 1"},
		{"local range", map[string]DeviceMap{"worker1": {{2, 0}}}, "device 2 is out of range: worker0 has 2"},
		{"remote range", map[string]DeviceMap{"worker1": {{0, 3}}}, "device 3 is out of range: worker1 has 3"},
		{"negative", map[string]DeviceMap{"worker1": {{-1, 0}}}, "device -1 is out of range"},
		{"unknown peer", map[string]DeviceMap{"worker9": {{0, 0}}}, "device map of worker0 to worker9: no such peer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, errs := world(t, TensorPipe, 2, func(rank int, s *Setup) {
				o := DefaultTensorPipe()
				o.Devices = 2 + rank
				if rank == 0 {
					o.DeviceMaps = c.maps
				}
				s.Options = o
			})
			for _, err := range errs { // every rank gets the same answer
				if c.want != "" {
					wantError(t, err, c.want)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	each(t, func(t *testing.T, backend string) {
		_, errs := world(t, backend, 2, func(_ int, s *Setup) { s.Name = "same" })
		wantError(t, errs[0], `two agents are named "same"`)
		wantError(t, errs[1], `two agents are named "same"`)
	})
}
