package client

import "maps"

// Option changes how a worker connects.
type Option func(*Client)

// WithEncoding sends the metrics of each report as encode makes them of a copy.
// It is EncodeData of the backend of the group, whose DecodeData the trainer
// calls with what comes.
func WithEncoding(encode func(metrics map[string]any) (map[string]any, error)) Option {
	return func(c *Client) { c.enc = encode }
}

// encoding is nil where metrics are sent as they are.
type encoding func(map[string]any) (map[string]any, error)

func (e encoding) apply(metrics map[string]any) (map[string]any, error) {
	if e == nil {
		return metrics, nil
	}
	return e(maps.Clone(metrics))
}
