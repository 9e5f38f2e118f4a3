package rpc

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// Options are the settings of an agent: [ProcessGroupOptions],
// [TensorPipeOptions], or the type of a registered backend.
type Options any

// Settings are options by name, as users give them. Durations are numbers of
// seconds or [time.Duration].
type Settings map[string]any

// Names of the built-in backends' settings.
const (
	SettingTimeout         = "rpc_timeout"
	SettingInitMethod      = "init_method"
	SettingSendRecvThreads = "num_send_recv_threads"
	SettingWorkerThreads   = "num_worker_threads"
	SettingChannels        = "num_channels"
	SettingMaxBytes        = "max_bytes"
	SettingListen          = "listen"
	SettingDevices         = "devices"
	SettingDeviceMaps      = "device_maps"
)

// Common are the settings of every agent.
type Common struct {
	// Timeout applies to calls whose context has no deadline: 0 for none,
	// [UnsetTimeout] for the default.
	Timeout    time.Duration
	InitMethod string // for the record only; peers meet by the setup's store
	MaxBytes   int    // largest argument or result; 0: [DefaultMaxBytes]
}

// ProcessGroupOptions are the options of an agent of PROCESS_GROUP.
type ProcessGroupOptions struct {
	Common
	SendRecvThreads int // bounds the messages in the messenger, and the functions that run, at once
}

// TensorPipeOptions are the options of an agent of TENSORPIPE.
type TensorPipeOptions struct {
	Common
	WorkerThreads int // functions that run at once
	Channels      int // connections to each peer; at least 2, so that large bodies have their own
	// Network and Listen are the address to listen on: "tcp" on a loopback
	// address, by default 127.0.0.1:0, or "unix" with the path of a socket.
	Network, Listen string
	Devices         int // of this agent, for the device maps of its peers
	DeviceMaps      map[string]DeviceMap
}

// DefaultProcessGroup returns new default options.
func DefaultProcessGroup() *ProcessGroupOptions {
	return &ProcessGroupOptions{Common: common(), SendRecvThreads: DefaultSendRecvThreads}
}

// DefaultTensorPipe returns new default options.
func DefaultTensorPipe() *TensorPipeOptions {
	return &TensorPipeOptions{
		Common: common(), WorkerThreads: DefaultWorkerThreads, Channels: DefaultChannels,
		Network: "tcp", Listen: "127.0.0.1:0",
	}
}

func common() Common {
	return Common{Timeout: DefaultTimeout, InitMethod: DefaultInitMethod, MaxBytes: DefaultMaxBytes}
}

// checked returns the settings with defaults in place of unset ones.
func (c Common) checked() (Common, error) {
	if c.Timeout == UnsetTimeout {
		c.Timeout = DefaultTimeout
	}
	if c.Timeout < 0 {
		return c, fmt.Errorf("%s of %v: give a positive duration, 0 for none, or %d for %v", SettingTimeout, c.Timeout, UnsetTimeout, DefaultTimeout)
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = DefaultMaxBytes
	}
	if c.MaxBytes < 0 || c.MaxBytes > math.MaxInt32 {
		return c, fmt.Errorf("%s of %d: give 1 to %d bytes", SettingMaxBytes, c.MaxBytes, math.MaxInt32)
	}
	if c.InitMethod == "" {
		c.InitMethod = DefaultInitMethod
	}
	return c, nil
}

func (o ProcessGroupOptions) checked() (ProcessGroupOptions, error) {
	var err error
	if o.Common, err = o.Common.checked(); err != nil {
		return o, err
	}
	if o.SendRecvThreads == 0 {
		o.SendRecvThreads = DefaultSendRecvThreads
	}
	return o, atLeastOne(SettingSendRecvThreads, o.SendRecvThreads)
}

func (o TensorPipeOptions) checked() (TensorPipeOptions, error) {
	var err error
	if o.Common, err = o.Common.checked(); err != nil {
		return o, err
	}
	if o.WorkerThreads == 0 {
		o.WorkerThreads = DefaultWorkerThreads
	}
	if o.Channels == 0 {
		o.Channels = DefaultChannels
	}
	if o.Network == "" && o.Listen == "" {
		o.Network, o.Listen = "tcp", "127.0.0.1:0"
	}
	if o.Channels > maxChannels {
		return o, fmt.Errorf("%s of %d: give 1 to %d", SettingChannels, o.Channels, maxChannels)
	}
	if o.Devices < 0 {
		return o, fmt.Errorf("%s of %d: give the number of this process's devices", SettingDevices, o.Devices)
	}
	if err := atLeastOne(SettingChannels, o.Channels); err != nil {
		return o, err
	}
	return o, atLeastOne(SettingWorkerThreads, o.WorkerThreads)
}

func atLeastOne(setting string, n int) error {
	if n < 1 {
		return fmt.Errorf("%s of %d: give 1 or more", setting, n)
	}
	return nil
}

// processGroupOptions returns options from settings, and the names of the unknown
// settings.
func processGroupOptions(s Settings) (_ Options, unknown []string, err error) {
	o := DefaultProcessGroup()
	r := o.Common.reader(s)
	r.number(SettingSendRecvThreads, &o.SendRecvThreads)
	checked, err := o.checked()
	return &checked, r.unknown(), r.or(err)
}

func tensorPipeOptions(s Settings) (_ Options, unknown []string, err error) {
	o := DefaultTensorPipe()
	r := o.Common.reader(s)
	r.number(SettingWorkerThreads, &o.WorkerThreads)
	r.number(SettingChannels, &o.Channels)
	r.number(SettingDevices, &o.Devices)
	if listen := ""; r.take(SettingListen, "a string", &listen) {
		o.Network, o.Listen = "tcp", listen
		if listen != "" && listen[0] == '/' {
			o.Network = "unix"
		}
	}
	r.take(SettingDeviceMaps, "a map from peers to device maps", &o.DeviceMaps)
	checked, err := o.checked()
	return &checked, r.unknown(), r.or(err)
}

// reader takes settings one by one.
type reader struct {
	left Settings
	err  error
}

func (c *Common) reader(s Settings) *reader {
	r := &reader{left: maps.Clone(s)}
	switch v := r.left[SettingTimeout].(type) {
	case time.Duration:
		c.Timeout = v
	case float64:
		c.Timeout = seconds(v)
	case int:
		c.Timeout = seconds(float64(v))
	case nil:
	default:
		r.err = &TypeError{SettingTimeout, "a number of seconds", v}
	}
	delete(r.left, SettingTimeout)
	r.take(SettingInitMethod, "a string", &c.InitMethod)
	r.number(SettingMaxBytes, &c.MaxBytes)
	return r
}

func seconds(v float64) time.Duration {
	if v == -1 {
		return UnsetTimeout
	}
	return time.Duration(v * float64(time.Second))
}

func (r *reader) number(name string, to *int) { r.take(name, "a whole number", to) }

// take moves a setting to the target of to; it reports whether there was one.
func (r *reader) take(name, want string, to any) bool {
	v, ok := r.left[name]
	if !ok {
		return false
	}
	delete(r.left, name)
	good := false
	switch to := to.(type) {
	case *int:
		*to, good = v.(int)
	case *string:
		*to, good = v.(string)
	case *map[string]DeviceMap:
		*to, good = v.(map[string]DeviceMap)
	}
	if !good {
		r.err = r.or(&TypeError{name, want, v})
	}
	return good
}

func (r *reader) or(err error) error {
	if r.err != nil {
		return r.err
	}
	return err
}

func (r *reader) unknown() []string { return slices.Sorted(maps.Keys(r.left)) }
