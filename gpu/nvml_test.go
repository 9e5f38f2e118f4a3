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

// machine is eight mocked A100 and the state of the NVML session. It fails the
// test where the real library would kill the process.
func machine(t *testing.T) (*dgxa100.Server, func(index int) *dgxa100.Device) {
	t.Helper()
	server := dgxa100.New()
	sessions := 0
	server.InitFunc = func() nvml.Return {
		sessions++
		return nvml.SUCCESS
	}
	server.ShutdownFunc = func() nvml.Return {
		sessions--
		if sessions < 0 {
			t.Error("Shutdown without Init")
		}
		return nvml.SUCCESS
	}
	inSession := func() {
		if sessions != 1 {
			t.Errorf("a call in %d sessions", sessions)
		}
	}
	count, find := server.DeviceGetCountFunc, server.DeviceGetHandleByIndexFunc
	server.DeviceGetCountFunc = func() (int, nvml.Return) {
		inSession()
		return count()
	}
	server.DeviceGetHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
		inSession()
		return find(index)
	}
	t.Cleanup(func() {
		if sessions != 0 {
			t.Errorf("%d sessions left open", sessions)
		}
	})
	return server, func(index int) *dgxa100.Device { return server.Devices[index].(*dgxa100.Device) }
}

func TestListDevices(t *testing.T) {
	server, device := machine(t)
	devices, err := list(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	if len(devices) != 8 {
		t.Fatalf("%d devices, want 8", len(devices))
	}
	for i, d := range devices {
		want := Device{UUID: device(i).UUID, Index: i, Name: "Mock NVIDIA A100-SXM4-40GB", MemoryBytes: 40 << 30}
		if !reflect.DeepEqual(d, want) {
			t.Errorf("got %+v, want %+v", d, want)
		}
	}
}

func TestListWithoutDriver(t *testing.T) {
	for _, ret := range []nvml.Return{nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED} {
		// Every other method of this mock, Shutdown included, panics.
		lib := &mock.Interface{InitFunc: func() nvml.Return { return ret }}
		devices, err := list(t.Context(), lib)
		if len(devices) != 0 || !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "nvidia-smi") {
			t.Errorf("%v: got %v, %v", ret, devices, err)
		}
	}
	lib := &mock.Interface{InitFunc: func() nvml.Return { return nvml.ERROR_LIB_RM_VERSION_MISMATCH }}
	if _, err := list(t.Context(), lib); err == nil || errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "reboot") {
		t.Errorf("version mismatch: %v", err)
	}
}

// The real binding, with a missing library, called twice: a call after the
// rejected Init would end the process.
func TestListWithoutLibrary(t *testing.T) {
	for range 2 {
		_, err := list(t.Context(), nvml.New(nvml.WithLibraryPath(t.TempDir()+"/libnvidia-ml.so.1")))
		if !errors.Is(err, ErrNoDriver) {
			t.Errorf("error %v, want ErrNoDriver", err)
		}
	}
}

// List works on this machine, with or without devices, and does not end the
// process.
func TestListHere(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	devices, err := List(ctx)
	if err != nil && !errors.Is(err, ErrNoDriver) {
		t.Fatal(err)
	}
	if err != nil && len(devices) != 0 {
		t.Errorf("%d devices without a driver", len(devices))
	}
	for _, d := range devices {
		if !strings.HasPrefix(d.UUID, "GPU-") || d.Name == "" {
			t.Errorf("device %+v", d)
		}
	}
}

func TestListNamesDevicesThatDoNotAnswer(t *testing.T) {
	server, device := machine(t)
	find := server.DeviceGetHandleByIndexFunc
	server.DeviceGetHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
		if index == 2 {
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return find(index)
	}
	device(5).GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_UNKNOWN }
	device(6).GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_NOT_SUPPORTED }
	devices, err := list(t.Context(), server)
	if err == nil || !strings.Contains(err.Error(), "device 2: find: ERROR_GPU_IS_LOST") || !strings.Contains(err.Error(), "device 5: read memory of "+device(5).UUID) {
		t.Errorf("error %v", err)
	}
	var indices []int
	for _, d := range devices {
		indices = append(indices, d.Index)
	}
	if !reflect.DeepEqual(indices, []int{0, 1, 3, 4, 6, 7}) {
		t.Errorf("devices %v", indices)
	}
	if devices[4].MemoryBytes != 0 {
		t.Errorf("%d bytes of memory, want 0: there is none of its own", devices[4].MemoryBytes)
	}
}

func TestListInstances(t *testing.T) {
	server, device := machine(t)
	partitioned := device(1)
	partitioned.MigMode = nvml.DEVICE_MIG_ENABLE
	partitioned.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	partitioned.GetMigDeviceHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
		if index > 1 {
			return nil, nvml.ERROR_NOT_FOUND
		}
		part := dgxa100.NewDevice(index)
		part.UUID, part.Name = []string{"MIG-b", "MIG-a"}[index], "A100 MIG 1g.5gb"
		part.MemoryInfo.Total = 5 << 30
		return part, nvml.SUCCESS
	}
	device(3).GetMigModeFunc = func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED }
	devices, err := list(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range devices {
		if d.MIG != (i == 1) {
			t.Errorf("device %d: MIG %v", i, d.MIG)
		}
	}
	want := []Instance{{"MIG-a", "A100 MIG 1g.5gb", 5 << 30}, {"MIG-b", "A100 MIG 1g.5gb", 5 << 30}}
	if !reflect.DeepEqual(devices[1].Instances, want) {
		t.Errorf("got %+v, want %+v", devices[1].Instances, want)
	}
	partitioned.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
	if _, err := list(t.Context(), server); err == nil || !strings.Contains(err.Error(), "MIG instances of "+partitioned.UUID) {
		t.Errorf("error %v", err)
	}
}

// An old driver lacks the MIG calls; calling one would end the process.
func TestListWithAnOldDriver(t *testing.T) {
	server, device := machine(t)
	server.LookupSymbolFunc = func(symbol string) error { return errors.New("no symbol " + symbol) }
	for i := range server.Devices {
		device(i).GetMigModeFunc = func() (int, int, nvml.Return) {
			t.Error("a call that the driver lacks")
			return 0, 0, nvml.ERROR_FUNCTION_NOT_FOUND
		}
	}
	if devices, err := list(t.Context(), server); err != nil || len(devices) != 8 {
		t.Errorf("%d devices, %v", len(devices), err)
	}
}

func TestListEndsWithItsContext(t *testing.T) {
	server, _ := machine(t)
	answer, hung := make(chan struct{}), make(chan struct{})
	server.DeviceGetCountFunc = func() (int, nvml.Return) {
		close(hung)
		<-answer
		return 0, nvml.SUCCESS
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-hung
		cancel()
	}()
	if _, err := list(ctx, server); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("error %v", err)
	}
	if _, err := list(ctx, server); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "earlier query") {
		t.Errorf("a second query did not wait behind the first: %v", err)
	}
	close(answer)
	server.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.SUCCESS }
	if devices, err := list(t.Context(), server); err != nil || len(devices) != 0 {
		t.Errorf("%d devices, %v", len(devices), err)
	}
}
