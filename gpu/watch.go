//go:build cgo && linux

package gpu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Watch reports the events of this machine's devices until ctx ends, which is not
// an error. It calls told for one event at a time, in its own goroutine and never
// after it has returned. It first reports as unwatched the devices that do not
// answer or do not support events.
//
// When a device is lost, Watch reports every device as gone and returns an error:
// only another Inspect can tell which devices remain. It also returns an error if
// the driver has not answered for a minute, and [ErrNoDriver] if there is no
// driver.
//
// The driver ends a wait within five seconds. Until then its session stays open
// after Watch has returned.
func Watch(ctx context.Context, told func(Event)) error { return watch(ctx, system, told) }

func watch(ctx context.Context, lib nvml.Interface, told func(Event)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	w := &watcher{lib: lib, beats: make(chan []Event), done: ctx.Done()}
	ended := make(chan error, 1)
	go func() { ended <- inSession(lib, w.run) }()
	late := time.NewTimer(silence)
	defer late.Stop()
	for {
		select {
		case events := <-w.beats:
			late.Reset(silence)
			for _, e := range events {
				if ctx.Err() != nil {
					return nil
				}
				told(e)
			}
		case err := <-ended:
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("watch GPUs: %w", err)
		case <-late.C:
			return fmt.Errorf("watch GPUs: the driver has not answered for %v; check nvidia-smi, and the kernel's log for Xid", silence)
		case <-ctx.Done():
			return nil
		}
	}
}

// watcher waits for events in a session. It sends the result of each wait, even
// an empty one, as a sign of life.
type watcher struct {
	lib   nvml.Interface
	beats chan []Event
	done  <-chan struct{}
	names map[nvml.Device]string
}

// errUnheard ends a watch that has no listener any more.
var errUnheard = errors.New("no listener")

func (w *watcher) run() (err error) {
	set, ret := w.lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("create event set: %v", name(ret))
	}
	defer func() {
		if ret := set.Free(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("free event set: %v", name(ret)))
		}
	}()
	mute, err := w.register(set)
	if err != nil {
		return err
	}
	if !w.tell(mute) {
		return errUnheard
	}
	if len(w.names) == 0 {
		return errors.New("no device of this machine reports errors while it runs; inspect them instead")
	}
	for {
		data, ret := set.Wait(waitMillis)
		var events []Event
		switch ret {
		case nvml.SUCCESS:
			events = w.read(data)
		case nvml.ERROR_TIMEOUT:
		case nvml.ERROR_GPU_IS_LOST:
			for _, uuid := range w.names {
				events = append(events, Event{UUID: uuid, Kind: Gone})
			}
			w.tell(events)
			return errors.New("a device is lost; see the kernel's log for Xid")
		default:
			return fmt.Errorf("wait for events: %v", name(ret))
		}
		if !w.tell(events) {
			return errUnheard
		}
	}
}

// tell is false when no listener is left.
func (w *watcher) tell(events []Event) bool {
	select {
	case w.beats <- events:
		return true
	case <-w.done:
		return false
	}
}

// register subscribes to the events of each device, and returns those without
// events: a device that does not answer must not silence the others.
func (w *watcher) register(set nvml.EventSet) (mute []Event, err error) {
	count, ret := w.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count devices: %v", name(ret))
	}
	w.names = map[nvml.Device]string{}
	for index := range count {
		uuid, why := w.registerAt(index, set)
		if why != "" {
			mute = append(mute, Event{UUID: uuid, Kind: Unwatched, Why: why})
		}
	}
	return mute, nil
}

// registerAt subscribes to one device. If that fails, it returns why.
func (w *watcher) registerAt(index int, set nvml.EventSet) (uuid, why string) {
	uuid = fmt.Sprint(index)
	handle, ret := w.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return uuid, "find: " + name(ret)
	}
	if uuid, ret = handle.GetUUID(); ret != nvml.SUCCESS {
		return fmt.Sprint(index), "read UUID: " + name(ret)
	}
	supported, ret := handle.GetSupportedEventTypes()
	if ret != nvml.SUCCESS {
		return uuid, "read its events: " + name(ret)
	}
	mask := supported & nvml.EventTypeXidCriticalError
	if mask == 0 {
		return uuid, "it has no XID events"
	}
	if ret := handle.RegisterEvents(mask, set); ret != nvml.SUCCESS {
		return uuid, "ask for its events: " + name(ret)
	}
	w.names[handle] = uuid
	return uuid, ""
}

// read converts an event. An event without a known device counts for every
// device.
func (w *watcher) read(data nvml.EventData) []Event {
	if data.EventType != nvml.EventTypeXidCriticalError {
		return nil // not subscribed
	}
	uuid, ok := w.names[data.Device]
	if !ok {
		var ret nvml.Return
		if uuid, ret = data.Device.GetUUID(); ret != nvml.SUCCESS {
			var all []Event
			for _, uuid := range w.names {
				all = append(all, Event{UUID: uuid, XID: data.EventData, Kind: kindOf(data.EventData)})
			}
			return all
		}
	}
	return []Event{{UUID: uuid, XID: data.EventData, Kind: kindOf(data.EventData)}}
}
