package object

import (
	"fmt"
	"strconv"
	"strings"
)

// Metered is a backend whose requests have a price, as the bytes that it keeps have. Stores charge
// for each request by its class, whatever its size: those that write or list cost the same, and
// those that read about a tenth of that. A request that removes something is free.
type Metered interface {
	// Writes returns the requests that write a file of size bytes: PUT and POST. A file that is
	// sent in parts has a request for each, and two for their begin and end.
	Writes(size int64) int
}

// Prices are what a bucket costs, in US dollars. It implements the flag values of pflag.
type Prices struct {
	Put   float64 `json:"put"`   // of 1000 PUT, POST, COPY and LIST requests
	Get   float64 `json:"get"`   // of 1000 GET and HEAD requests
	Month float64 `json:"month"` // of a GiB kept for a month
}

// Standard returns the list prices of S3 Standard in us-east-1 in 2026. They are without those of
// data that leaves the region.
func Standard() Prices { return Prices{Put: 0.005, Get: 0.0004, Month: 0.023} }

// Puts returns the price of some PUT, POST, COPY and LIST requests.
func (p Prices) Puts(n int) float64 { return float64(n) * p.Put / 1000 }

// Gets returns the price of some GET and HEAD requests.
func (p Prices) Gets(n int) float64 { return float64(n) * p.Get / 1000 }

// Kept returns the price of keeping some bytes for a month.
func (p Prices) Kept(bytes int64) float64 { return float64(bytes) / (1 << 30) * p.Month }

// String returns the prices as [Prices.Set] reads them.
func (p *Prices) String() string {
	return fmt.Sprintf("put=%v,get=%v,month=%v", p.Put, p.Get, p.Month)
}

// Set reads prices such as "put=0.005,month=0.023". Those that it does not name stay.
func (p *Prices) Set(text string) error {
	next := *p
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(part, "=")
		to := map[string]*float64{"put": &next.Put, "get": &next.Get, "month": &next.Month}[name]
		dollars, err := strconv.ParseFloat(value, 64)
		if to == nil || err != nil || !(dollars >= 0 && dollars <= 1e6) {
			return fmt.Errorf("%q is no price in US dollars; want such as put=0.005,get=0.0004,month=0.023: of 1000 PUT and LIST requests, of 1000 GET and HEAD requests, and of a GiB a month", part)
		}
		*to = dollars
	}
	*p = next
	return nil
}

// Type names the value in the help of a command.
func (p *Prices) Type() string { return "prices" }
