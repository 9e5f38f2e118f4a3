//go:build cgo && linux

package gpu

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
)

// wait is the answer to one wait for events.
type wait struct {
	data nvml.EventData
	ret  nvml.Return
}

// watched returns a machine whose devices report XIDs. The test sends the result
// of each wait for events.
func watched(t *testing.T) (*dgxa100.Server, func(index int) *dgxa100.Device, chan wait) {
	t.Helper()
	server, device := machine(t)
	waits := make(chan wait)
	freed := 0
	server.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
		return &mock.EventSet{
			WaitFunc: func(millis uint32) (nvml.EventData, nvml.Return) {
				if millis != 5000 {
					t.Errorf("a wait of %d ms", millis)
				}
				w := <-waits
				return w.data, w.ret
			},
			FreeFunc: func() nvml.Return { freed++; return nvml.SUCCESS },
		}, nvml.SUCCESS
	}
	t.Cleanup(func() {
		if freed != 1 {
			t.Errorf("the set of events was freed %d times", freed)
		}
	})
	for i := range server.Devices {
		device(i).GetSupportedEventTypesFunc = func() (uint64, nvml.Return) {
			return nvml.EventTypeXidCriticalError | nvml.EventTypePState, nvml.SUCCESS
		}
		device(i).RegisterEventsFunc = func(mask uint64, _ nvml.EventSet) nvml.Return {
			if mask != nvml.EventTypeXidCriticalError {
				t.Errorf("asked for events %b", mask)
			}
			return nvml.SUCCESS
		}
	}
	return server, device, waits
}

func xid(d nvml.Device, number uint64) wait {
	return wait{nvml.EventData{Device: d, EventType: nvml.EventTypeXidCriticalError, EventData: number}, nvml.SUCCESS}
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, device, waits := watched(t)
		device(7).GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
		find := server.DeviceGetHandleByIndexFunc
		server.DeviceGetHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
			if index == 6 {
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			return find(index)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var got []Event
		ended := make(chan error)
		go func() { ended <- watch(ctx, server, func(e Event) { got = append(got, e) }) }()
		waits <- wait{ret: nvml.ERROR_TIMEOUT}
		for _, number := range slices.Concat(hardwareXIDs, applicationXIDs) {
			waits <- xid(server.Devices[3], number)
		}
		waits <- wait{ret: nvml.ERROR_TIMEOUT}
		waits <- xid(server.Devices[1], 63)
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		waits <- xid(server.Devices[1], 79) // not reported
		want := []Event{
			{UUID: "6", Kind: Unwatched, Why: "find: ERROR_GPU_IS_LOST"},
			{UUID: device(7).UUID, Kind: Unwatched, Why: "read its events: ERROR_NOT_SUPPORTED"},
		}
		for _, number := range hardwareXIDs {
			want = append(want, Event{UUID: device(3).UUID, XID: number, Kind: Hardware})
		}
		for _, number := range applicationXIDs {
			want = append(want, Event{UUID: device(3).UUID, XID: number, Kind: Application})
		}
		want = append(want, Event{UUID: device(1).UUID, XID: 63, Kind: Other})
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
		for _, e := range got {
			if e.Sick() != (e.Kind == Hardware) {
				t.Errorf("%v is sick: %v", e, e.Sick())
			}
		}
		synctest.Wait()
	})
}

// After the loss of one device none can be trusted.
func TestWatchLostDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, _, waits := watched(t)
		var got []Event
		ended := make(chan error)
		go func() { ended <- watch(t.Context(), server, func(e Event) { got = append(got, e) }) }()
		waits <- wait{ret: nvml.ERROR_GPU_IS_LOST}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "a device is lost") {
			t.Errorf("error %v", err)
		}
		if len(got) != 8 || !got[0].Sick() || got[0].Kind != Gone {
			t.Errorf("told %+v", got)
		}
	})
}

// An event without a known device counts for every device.
func TestWatchUnknownDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, _, waits := watched(t)
		ctx, cancel := context.WithCancel(t.Context())
		var got []Event
		ended := make(chan error)
		go func() { ended <- watch(ctx, server, func(e Event) { got = append(got, e) }) }()
		stranger := &mock.Device{GetUUIDFunc: func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }}
		waits <- xid(stranger, 79)
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil || len(got) != 8 {
			t.Errorf("told %+v, %v", got, err)
		}
		waits <- wait{ret: nvml.ERROR_TIMEOUT}
		synctest.Wait()
	})
}

func TestWatchWithoutEvents(t *testing.T) {
	server, device, _ := watched(t)
	for i := range server.Devices {
		device(i).GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return nvml.EventTypePState, nvml.SUCCESS }
	}
	told := 0
	err := watch(t.Context(), server, func(e Event) {
		if told++; e.Kind != Unwatched {
			t.Errorf("told %+v", e)
		}
	})
	if err == nil || !strings.Contains(err.Error(), "no device of this machine reports") || told != 8 {
		t.Errorf("%d devices reported, error %v", told, err)
	}
}

// Watch abandons a driver that hangs in a wait, also if ctx ends first.
func TestWatchHangingDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, _, waits := watched(t)
		err := watch(t.Context(), server, func(Event) {})
		if err == nil || errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "has not answered for 1m0s") {
			t.Errorf("error %v", err)
		}
		waits <- wait{ret: nvml.ERROR_TIMEOUT} // it wakes up
		synctest.Wait()
	})
}

func TestEventTexts(t *testing.T) {
	for e, want := range map[Event]string{
		{XID: 79, Kind: Hardware}:   "XID 79: it has fallen off the bus",
		{XID: 63, Kind: Other}:      "XID 63",
		{Kind: Gone}:                "a device of this machine is lost",
		{Kind: Unwatched, Why: "w"}: "the device does not report errors while it runs: w",
	} {
		if got := e.String(); got != want {
			t.Errorf("%+v: %q, want %q", e, got, want)
		}
	}
}
