//go:build cgo && linux

package gpu

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
)

// measured returns a machine whose devices answer every query and are healthy:
// two halves of four devices each.
func measured(t *testing.T) (*dgxa100.Server, func(index int) *dgxa100.Device) {
	t.Helper()
	server, device := machine(t)
	for i := range server.Devices {
		d := device(i)
		d.MemoryInfo.Used = 3 << 30
		d.GetTotalEccErrorsFunc = func(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
			if kind != nvml.MEMORY_ERROR_TYPE_UNCORRECTED || counter != nvml.VOLATILE_ECC {
				t.Errorf("asked for errors %v in %v", kind, counter)
			}
			return 0, nvml.SUCCESS
		}
		d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 1, 0, false, false, nvml.SUCCESS }
		d.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 41, nvml.SUCCESS }
		d.GetTemperatureThresholdFunc = func(nvml.TemperatureThresholds) (uint32, nvml.Return) { return 88, nvml.SUCCESS }
		d.GetPowerUsageFunc = func() (uint32, nvml.Return) { return 62500, nvml.SUCCESS }
		d.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{Gpu: 7}, nvml.SUCCESS }
		d.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
			if link >= 12 {
				return 0, nvml.ERROR_INVALID_ARGUMENT
			}
			return nvml.FEATURE_ENABLED, nvml.SUCCESS
		}
		d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS }
		d.GetTopologyCommonAncestorFunc = func(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
			if i/4 == other.(*dgxa100.Device).Index/4 {
				return nvml.TOPOLOGY_SINGLE, nvml.SUCCESS
			}
			return nvml.TOPOLOGY_SYSTEM, nvml.SUCCESS
		}
	}
	return server, device
}

func look(t *testing.T, lib nvml.Interface) Inventory {
	t.Helper()
	i, err := inspect(t.Context(), lib)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// wantProblems compares problems by device, severity and parts of their texts.
func wantProblems(t *testing.T, i Inventory, want ...Problem) {
	t.Helper()
	got := i.Health()
	if len(got) != len(want) {
		t.Fatalf("problems %+v, want %+v", got, want)
	}
	for n, w := range want {
		g := got[n]
		if g.Device != w.Device || g.Severity != w.Severity || !strings.Contains(g.What, w.What) || !strings.Contains(g.Next, w.Next) {
			t.Errorf("problem %+v, want %+v", g, w)
		}
	}
}

func ptr[T any](v T) *T { return &v }

func TestInspectHealthy(t *testing.T) {
	server, device := measured(t)
	i := look(t, server)
	if i.Driver != "550.54.15" || i.CUDA != "12.4" || len(i.Devices) != 8 || len(i.Links) != 28 || i.Unread != nil {
		t.Fatalf("inventory %+v", i)
	}
	want := Status{
		Device:    Device{UUID: device(5).UUID, Index: 5, Name: "Mock NVIDIA A100-SXM4-40GB", MemoryBytes: 40 << 30},
		UsedBytes: ptr(uint64(3 << 30)), ECC: ptr(uint64(0)), Rows: &Rows{Correctable: 1},
		Celsius: ptr(uint32(41)), SlowAtCelsius: ptr(uint32(88)), Milliwatts: ptr(uint32(62500)), Utilization: ptr(uint32(7)),
		NVLinks: ptr(12), Processes: []Process{},
	}
	if !reflect.DeepEqual(i.Devices[5], want) {
		t.Errorf("got %+v, want %+v", i.Devices[5], want)
	}
	near := 0
	for _, l := range i.Links {
		switch l.Level {
		case OneSwitch:
			near++
		case AcrossNodes:
		default:
			t.Errorf("link %+v", l)
		}
	}
	if near != 12 {
		t.Errorf("%d pairs at one switch, want 12", near)
	}
	wantProblems(t, i)
	for _, id := range []string{"5", device(5).UUID} {
		if s, ok := i.Find(id); !ok || s.Index != 5 {
			t.Errorf("%s is %+v, %v", id, s, ok)
		}
	}
	if s, ok := i.Find("GPU-x"); ok {
		t.Errorf("GPU-x is %+v", s)
	}
}

func TestHealth(t *testing.T) {
	server, device := measured(t)
	device(0).GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 3, nvml.SUCCESS }
	device(1).GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 1, true, false, nvml.SUCCESS }
	device(2).GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 9, false, true, nvml.SUCCESS }
	device(3).GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 90, nvml.SUCCESS }
	unknown := nvml.VALUE_NOT_AVAILABLE
	device(4).GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 77, UsedGpuMemory: 5 << 30}, {Pid: 78, UsedGpuMemory: uint64(unknown)}}, nvml.SUCCESS
	}
	device(5).GetPowerUsageFunc = func() (uint32, nvml.Return) { return 0, nvml.ERROR_GPU_IS_LOST }
	device(6).GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_UNKNOWN }
	device(7).GetPowerUsageFunc = func() (uint32, nvml.Return) { return 0, nvml.ERROR_NO_PERMISSION }
	i := look(t, server)
	wantProblems(
		t, i,
		Problem{device(0).UUID, Unhealthy, "3 memory errors that ECC could not correct", "nvidia-smi -r -i " + device(0).UUID},
		Problem{device(1).UUID, Unhealthy, "only by the next reset", "nvidia-smi -r -i " + device(1).UUID},
		Problem{device(2).UUID, Unhealthy, "no spare row is left", "replace the device"},
		Problem{device(3).UUID, Warning, "90 °C, from 88 °C on it slows down", "air flow"},
		Problem{device(4).UUID, Warning, "other processes: pid 77 with 5120 MiB, pid 78", "other devices"},
		Problem{device(5).UUID, Unhealthy, "does not answer: read power: ERROR_GPU_IS_LOST", "dmesg"},
		Problem{device(6).UUID, Unhealthy, "does not answer: read memory of " + device(6).UUID + ": ERROR_UNKNOWN", "dmesg"},
		Problem{device(7).UUID, Warning, "not read: power (ERROR_NO_PERMISSION)", "nvidia-smi -q"},
	)
	if got := i.Devices[4].Health(77, 78); len(got) != 0 {
		t.Errorf("own processes are foreign: %+v", got)
	}
	if len(i.Links) != 15 {
		t.Errorf("%d links between the 6 devices that answer, want 15", len(i.Links))
	}
}

// A device that does not even return its UUID is still in the inventory.
func TestInspectLostDevice(t *testing.T) {
	server, _ := measured(t)
	find := server.DeviceGetHandleByIndexFunc
	server.DeviceGetHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
		if index == 2 {
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return find(index)
	}
	i := look(t, server)
	wantProblems(t, i, Problem{"2", Unhealthy, "find: ERROR_GPU_IS_LOST", "dmesg"})
	if s, ok := i.Find("2"); !ok || s.Lost == "" {
		t.Errorf("device 2 is %+v, %v", s, ok)
	}
	if _, ok := i.Find(""); ok {
		t.Error("the empty ID names a device")
	}
}

// What a device does not support is absent; nothing is zero unless measured.
func TestInspectOnlyWhatIsSupported(t *testing.T) {
	server, device := measured(t)
	for i := range server.Devices {
		d := device(i)
		d.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) {
			return 0, 0, false, false, nvml.ERROR_NOT_SUPPORTED
		}
		d.GetTemperatureThresholdFunc = func(nvml.TemperatureThresholds) (uint32, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
		d.GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
		d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED }
		d.GetTopologyCommonAncestorFunc = func(nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	}
	i := look(t, server)
	wantProblems(t, i)
	s := i.Devices[0]
	if s.ECC != nil || s.Rows != nil || s.SlowAtCelsius != nil || s.NVLinks != nil || s.Processes != nil || i.Links != nil || s.Celsius == nil {
		t.Errorf("status %+v, links %+v", s, i.Links)
	}
	if _, err := holdersOf(t.Context(), server, []int{1}); err == nil || !strings.Contains(err.Error(), "list processes of "+device(0).UUID) {
		t.Errorf("who holds memory is not known, the error is %v", err)
	}
}

// This driver lacks every newer function: calling one would end the process.
func TestInspectWithAnOldDriver(t *testing.T) {
	server, _ := machine(t)
	server.LookupSymbolFunc = func(symbol string) error { return errors.New("no symbol " + symbol) }
	i := look(t, server) // panics on a function outside the mock
	if len(i.Devices) != 8 || i.CUDA != "" || i.Devices[0].UsedBytes != nil {
		t.Errorf("inventory %+v", i)
	}
	if _, err := holdersOf(t.Context(), server, []int{1}); err == nil || !strings.Contains(err.Error(), "update it") {
		t.Errorf("error %v", err)
	}
}

func TestInspectMIG(t *testing.T) {
	server, device := measured(t)
	d := device(1)
	d.MigMode = nvml.DEVICE_MIG_ENABLE
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 1, nvml.SUCCESS }
	part := dgxa100.NewDevice(0)
	part.UUID = "MIG-a"
	d.GetMigDeviceHandleByIndexFunc = func(int) (nvml.Device, nvml.Return) { return part, nvml.SUCCESS }
	d.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) {
		t.Error("a device in MIG mode is asked for its utilization")
		return nvml.Utilization{}, nvml.ERROR_NOT_SUPPORTED
	}
	d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 9, UsedGpuMemory: 1 << 20, GpuInstanceId: 1}, {Pid: 9, UsedGpuMemory: 2 << 20, GpuInstanceId: 2}}, nvml.SUCCESS
	}
	i := look(t, server)
	if s, ok := i.Find("MIG-a"); !ok || s.Index != 1 || s.Utilization != nil || !s.MIG {
		t.Errorf("MIG-a is of %+v, %v", s, ok)
	}
	if got, want := i.Devices[1].Processes, []Process{{9, ptr(uint64(3 << 20))}}; !reflect.DeepEqual(got, want) {
		t.Errorf("processes %+v, want %+v", got, want)
	}
}

func TestInspectWithoutDriver(t *testing.T) {
	// Every other method of this mock, Shutdown included, panics.
	lib := &mock.Interface{InitFunc: func() nvml.Return { return nvml.ERROR_LIBRARY_NOT_FOUND }}
	if _, err := inspect(t.Context(), lib); !errors.Is(err, ErrNoDriver) {
		t.Errorf("inspect: %v", err)
	}
	if _, err := holdersOf(t.Context(), lib, nil); !errors.Is(err, ErrNoDriver) {
		t.Errorf("holders: %v", err)
	}
	if err := watch(t.Context(), lib, nil); !errors.Is(err, ErrNoDriver) {
		t.Errorf("watch: %v", err)
	}
}

// Inspect works on this machine, with or without devices, and does not end the
// process.
func TestInspectHere(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	i, err := System{}.Inspect(ctx)
	if err != nil && !errors.Is(err, ErrNoDriver) {
		t.Fatal(err)
	}
	for _, s := range i.Devices {
		if s.Lost == "" && !strings.HasPrefix(s.UUID, "GPU-") {
			t.Errorf("device %+v", s)
		}
	}
	if err == nil {
		if _, err = (System{}).HoldersOf(ctx, 1); err != nil {
			t.Error(err)
		}
	}
}

func TestHoldersOf(t *testing.T) {
	server, device := measured(t)
	device(6).GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 5, UsedGpuMemory: 1}, {Pid: 6, UsedGpuMemory: 2}}, nvml.SUCCESS
	}
	got, err := holdersOf(t.Context(), server, []int{6, 7})
	if want := []Holder{{device(6).UUID, 6, ptr(uint64(2))}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

func TestInspectHangingDriver(t *testing.T) {
	server, device := measured(t)
	answer, hung := make(chan struct{}), make(chan struct{})
	device(3).GetPowerUsageFunc = func() (uint32, nvml.Return) {
		close(hung)
		<-answer
		return 0, nvml.SUCCESS
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-hung
		cancel()
	}()
	if _, err := inspect(ctx, server); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("error %v", err)
	}
	close(answer)
	device(3).GetPowerUsageFunc = func() (uint32, nvml.Return) { return 0, nvml.SUCCESS }
	look(t, server) // runs after the first has ended
}

// The library stays loaded while any session is open.
func TestSharedSessions(t *testing.T) {
	inits, ends := 0, 0
	lib := &shared{Interface: &mock.Interface{
		InitFunc:     func() nvml.Return { inits++; return nvml.SUCCESS },
		ShutdownFunc: func() nvml.Return { ends++; return nvml.SUCCESS },
	}}
	_ = lib.Init()
	_ = lib.Init()
	_ = lib.Shutdown()
	if inits != 1 || ends != 0 {
		t.Errorf("%d begins, %d ends with a session left", inits, ends)
	}
	_ = lib.Shutdown()
	_ = lib.Init()
	if inits != 2 || ends != 1 {
		t.Errorf("%d begins, %d ends, then another", inits, ends)
	}
}
